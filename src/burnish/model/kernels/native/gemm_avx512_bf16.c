#define ISA avx512_bf16
#define ROW_ISA avx512
#include "vector_avx512.h"

#include "functions.h"

/* 6 rows x 4 panels: 24 sums, 4 registers of weights and one of inputs out of 32. */
#define MAX_ROWS 6
#define MAX_PANELS 4
#define ROWS_OF(CASE, P) CASE(1, P) CASE(2, P) CASE(3, P) CASE(4, P) CASE(5, P) CASE(6, P)
#define ALL_TILES(CASE) ROWS_OF(CASE, 1) ROWS_OF(CASE, 2) ROWS_OF(CASE, 4)

typedef __m512i weights;
typedef __m512i inputs;

static inline weights load_weights(const bf16 *p) { return _mm512_loadu_si512(p); }
static inline inputs load_inputs(const bf16 *p) {
    int32_t pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
}
static inline vec add_products(vec sum, weights w, inputs x) {
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x);
}

#include "gemm_pairs.h"

#include "gemm.h"
#include "layer.h"
