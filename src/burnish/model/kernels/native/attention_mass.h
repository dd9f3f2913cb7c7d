/* What a query makes of each page: a bound on its scores, and how much attention falls on it. */
#pragma once
#include "attention_run.h"

/* Add the scores of one unit of keys to the running maximum and sum of its page. */
INLINE void add_unit(const row_task *t, const key_block *block, int u, int64_t position,
                     const uint32_t *query, float *top, float *sum, int wide) {
    float scores[UNIT_KEYS];
    vec found[UNIT_VECS], factor = v_set(t->batch->scale * 1.44269504f);
    for (int v = 0; v < UNIT_VECS; v++) found[v] = v_zero();
    for (int64_t s = 0; s < t->words; s++)
        for (int pass = 0; pass < passes_of(wide); pass++)
            for (int v = 0; v < UNIT_VECS; v++) {
                const char *words = block->keys[u * UNIT_VECS + v] + s * LINE_BYTES;
                found[v] = dot(query, s, operand_of(words, wide, pass), found[v], wide, pass);
            }
    for (int v = 0; v < UNIT_VECS; v++) {
        vec x = v_mul(found[v], factor);
        if (block->scaled) x = v_mul(x, v_load(block->key_scales + u * UNIT_KEYS + v * LANES));
        v_store(scores + v * LANES, x);
    }
    float now = *top;
    for (int i = 0; i < UNIT_KEYS; i++) {
        if (block->first[u] + i > position) scores[i] = -INFINITY;
        now = scores[i] > now ? scores[i] : now;
    }
    if (now == -INFINITY) return;
    vec total = v_zero();
    for (int v = 0; v < UNIT_VECS; v++)
        total = v_add(total, exp2_of(v_sub(v_load(scores + v * LANES), v_set(now))));
    *sum = *sum * exp2_one(*top - now) + v_sum(total);
    *top = now;
}

/* Row `head` of query `token`: the logarithm of the summed exponentials of each page's scores. */
static void mass_row(const row_task *t, int64_t token, int64_t head, char *copies, float *to,
                     int wide) {
    const page_store *s = t->store;
    uint32_t query[MAX_WIDTH];
    row_task own = *t;
    own.head_from = head / t->group, own.head_to = own.head_from + 1;
    int64_t at = (token * t->batch->heads + head) * s->width, last = t->span->start, page = -1;
    const void *from = (const char *)t->batch->queries + at * (t->batch->is_f32 ? 4 : 2);
    if (wide) memcpy(query, from, (size_t)s->width * 4);
    else take_row(from, (int)t->batch->is_f32, s->width, WIDE_ROWS, query);
    float top = -INFINITY, sum = 0.0f;
    for (int64_t start = 0; start <= last; start += BLOCK_KEYS) {
        key_block block;
        take_block(&own, own.head_from, start, copies, &block,
                   wide ? PRODUCTS_F32 : PRODUCTS_PAIRS);
        for (int u = 0; u < block.units; u++) {
            if (block.first[u] / s->page_keys != page) {
                if (page >= 0) to[page] = top * 0.69314718f + logf(sum);
                page = block.first[u] / s->page_keys, top = -INFINITY, sum = 0.0f;
            }
            add_unit(&own, &block, u, last, query, &top, &sum, wide);
        }
    }
    if (page >= 0) to[page] = top * 0.69314718f + logf(sum);
}

int FOR_ISA(mass_pages)(const page_store *store, const query_batch *batch,
                        const page_span *spans, int64_t num_spans, const int32_t *tables,
                        float *out, int64_t out_stride, int num_threads) {
    int64_t group = batch->heads / store->heads;
    int64_t bytes = BLOCK_UNITS * 4 * UNIT_KEYS * store->width;
    int wide = store->kind == PAGE_F32;
    char *copies = aligned_alloc(64, (size_t)(aligned(bytes) * num_threads));
    if (!copies) return -1;
#pragma omp parallel for num_threads(num_threads) collapse(2) schedule(dynamic, 1)
    for (int64_t i = 0; i < num_spans; i++)
        for (int64_t head = 0; head < batch->heads; head++) {
            row_task t = {.store = store, .batch = batch, .span = spans + i,
                          .table = tables + spans[i].table, .group = group,
                          .words = store->width / (wide ? 1 : 2), .from = 0, .to = 1};
            float *to = out + (spans[i].first * batch->heads + head) * out_stride;
            mass_row(&t, spans[i].first, head, copies + omp_get_thread_num() * aligned(bytes),
                     to, wide);
        }
    free(copies);
    return 0;
}

/* Pages of one task, and how far ahead their bounds are fetched: pages lie anywhere. */
enum { BOUND_PAGES = 128, BOUND_AHEAD = 4 };

static void bound_row(const page_store *store, const void *query, int is_f32, float scale,
                      int64_t head, const int32_t *table, int64_t pages, float *to) {
    int64_t width = store->width;
    for (int64_t i = 0; i < pages; i++) {
        if (i + BOUND_AHEAD < pages && table[i + BOUND_AHEAD] >= 0) {
            const char *next = (const char *)bounds_of(store, table[i + BOUND_AHEAD], head);
            for (int64_t byte = 0; byte < 4 * width; byte += LINE_BYTES) fetch(next + byte);
        }
        if (table[i] < 0) {
            to[i] = -INFINITY;
            continue;
        }
        const bf16 *low = bounds_of(store, table[i], head), *high = low + width;
        vec sum = v_zero();
        for (int64_t d = 0; d < width; d += LANES) {
            vec q = is_f32 ? v_load((const float *)query + d) : v_load_bf16((const bf16 *)query + d);
            sum = v_add(sum, v_max(v_mul(q, v_load_bf16(low + d)), v_mul(q, v_load_bf16(high + d))));
        }
        to[i] = v_sum(sum) * scale;
    }
}

void FOR_ISA(bound_pages)(const page_store *store, const query_batch *batch,
                          const int64_t *starts, int64_t tokens, const int32_t *tables,
                          float *out, int64_t out_stride, int num_threads) {
    int64_t group = batch->heads / store->heads, longest = 0;
    for (int64_t i = 0; i < tokens; i++)
        longest = starts[i + 1] - starts[i] > longest ? starts[i + 1] - starts[i] : longest;
    int64_t pieces = (longest + BOUND_PAGES - 1) / BOUND_PAGES;
#pragma omp parallel for num_threads(num_threads) collapse(3) schedule(dynamic, 1)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < batch->heads; head++)
            for (int64_t piece = 0; piece < pieces; piece++) {
                int64_t first = starts[token] + piece * BOUND_PAGES, left = starts[token + 1] - first;
                if (left <= 0) continue;
                int64_t row = token * batch->heads + head;
                const char *query =
                    (const char *)batch->queries + row * store->width * (batch->is_f32 ? 4 : 2);
                bound_row(store, query, (int)batch->is_f32, batch->scale, head / group,
                          tables + first, left < BOUND_PAGES ? left : BOUND_PAGES,
                          out + row * out_stride + piece * BOUND_PAGES);
            }
}
