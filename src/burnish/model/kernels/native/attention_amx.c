/* Attention of long spans by tiles; everything else is that of the vectors that such CPUs have too.
   A test compiles this file with tiles in plain C (TILES_HEADER) for the vectors of its machine. */
#define ISA amx
#define HAS_TILES 1
#ifndef TILES_HEADER
#define TILES_HEADER "tiles.h"
#endif
#ifdef __AVX512F__
#include "vector_avx512.h"
#else
#include "vector_avx2.h"
#endif

#ifdef __AVX512BF16__
#define FOR_OTHERS(name) CONCAT(name, avx512_bf16)
#elif defined(__AVX512F__)
#define FOR_OTHERS(name) CONCAT(name, avx512)
#else
#define FOR_OTHERS(name) CONCAT(name, avx2)
#endif

#include TILES_HEADER

#include "attention_run.h"

/* Long spans by tiles, the others by vectors: those have the same bits beside long ones or not. */
int FOR_ISA(attend_pages)(const page_store *store, const query_batch *batch,
                          const page_span *spans, int64_t num_spans, const int32_t *tables,
                          int num_threads) {
    if (!tiles_fit(store))
        return FOR_OTHERS(attend_pages)(store, batch, spans, num_spans, tables, num_threads);
    page_span *sorted = malloc(sizeof(page_span) * (size_t)(num_spans + 1));
    if (!sorted) return -1;
    int64_t tiled = 0, others = num_spans;
    for (int64_t i = 0; i < num_spans; i++)
        sorted[is_tiled(spans + i) ? tiled++ : --others] = spans[i];
    int failed = attend(store, batch, sorted, tiled, tables, num_threads);
    if (!failed && tiled < num_spans)
        failed = FOR_OTHERS(attend_pages)(store, batch, sorted + tiled, num_spans - tiled, tables,
                                          num_threads);
    free(sorted);
    return failed;
}

#include "attention_check.h"
