/* A few rows of a task over one block of keys. A task is all rows of some neighbouring tokens over the
   keys of some key/value heads; its rows are in order of key/value head, token, query head. */
#pragma once
#include "attention_bytes.h"
#include "attention_pages.h"

/* 2 ** x to 1e-7 by Taylor's series of degree 6 on [-0.5, 0.5]; exactly 1 at 0, exactly 0 at -inf,
   NaN at NaN. */
INLINE vec exp2_of(vec x) {
    x = v_max(v_set(-160.0f), x);
    vec whole = v_round(x), r = v_sub(x, whole);
    vec p = v_set(1.5403530e-4f);
    p = v_fma(p, r, v_set(1.33335581e-3f));
    p = v_fma(p, r, v_set(9.61812911e-3f));
    p = v_fma(p, r, v_set(5.55041087e-2f));
    p = v_fma(p, r, v_set(2.40226507e-1f));
    p = v_fma(p, r, v_set(6.93147181e-1f));
    return v_scale2(v_fma(p, r, v_set(1.0f)), whole);
}
INLINE float exp2_one(float x) {
    float all[LANES];
    v_store(all, exp2_of(v_set(x)));
    return all[0];
}

/* Up to four units of keys that exist, in order. */
typedef struct {
    int units;
    int64_t first[BLOCK_UNITS];
    const char *keys[BLOCK_UNITS * UNIT_VECS];
    const char *values[BLOCK_UNITS];
    /* Those of the next block; where there are none, these. */
    const char *next_keys[BLOCK_UNITS], *next_values[BLOCK_UNITS];
    /* One-byte pages: their scales, and whether these are widened copies. */
    int scaled, copied;
    float key_scales[BLOCK_KEYS], value_scales[BLOCK_KEYS];
} key_block;

/* What a thread works in. */
typedef struct {
    uint32_t *queries;
    float *tops, *sums, *accs;
    float *part_tops, *part_sums, *part_accs;
    /* Products of bytes only: step of the queries, and what their shift adds. */
    float *steps;
    int32_t *biases;
    char *wide;
} row_space;

typedef struct {
    const page_store *store;
    const query_batch *batch;
    const page_span *span;
    const int32_t *table;
    int64_t group, words;
    /* Heads of keys and values, tokens of the span, parts of their keys. */
    int64_t head_from, head_to, from, to, part_from, part_to;
    /* Place among the partial results, -1 if these rows are done in one piece. */
    int64_t partial;
} row_task;

INLINE int64_t rows_per_head(const row_task *t) { return (t->to - t->from) * t->group; }
INLINE int64_t rows_of(const row_task *t) {
    return (t->head_to - t->head_from) * rows_per_head(t);
}
/* From one row of queries to the next. */
INLINE int64_t row_words(const row_task *t, enum products products) {
    return widens_rows(products) ? t->store->width : t->words;
}
INLINE int64_t position_of(const row_task *t, int64_t row) {
    return t->span->start + t->from + row % rows_per_head(t) / t->group;
}
/* Where the numbers of a row begin in queries and outputs. */
INLINE int64_t place_of(const row_task *t, int64_t row) {
    int64_t head = (t->head_from + row / rows_per_head(t)) * t->group + row % t->group;
    int64_t token = t->span->first + t->from + row % rows_per_head(t) / t->group;
    return (token * t->batch->heads + head) * t->store->width;
}
INLINE int64_t window_start(const page_span *span, int64_t position) {
    int64_t low = span->window ? position - span->window + 1 : 0;
    return low > 0 ? low : 0;
}

/* Point `block` at the units from key `start` that some row of the task may see. */
INLINE void take_block(const row_task *t, int64_t head, int64_t start, char *wide,
                       key_block *block, enum products products) {
    const page_store *s = t->store;
    int64_t low = window_start(t->span, t->span->start + t->from);
    int64_t last = t->span->start + t->to - 1, written = t->span->start + t->span->count;
    block->units = 0;
    block->scaled = is_narrow(s->kind);
    block->copied = block->scaled && products != PRODUCTS_BYTES;
    for (int64_t key = start; key < start + BLOCK_KEYS && key <= last; key += UNIT_KEYS) {
        int64_t page = t->table[key / s->page_keys], offset = key % s->page_keys;
        if (page < 0 || (key >= t->span->sink && key + UNIT_KEYS <= low)) continue;
        int u = block->units++;
        const char *keys = head_of(s, page, head) + offset / UNIT_KEYS * unit_bytes(s);
        const char *values = keys + half_bytes(s);
        block->first[u] = key;
        if (block->scaled) {
            const bf16 *scales = (const bf16 *)(head_of(s, page, head) + 2 * half_bytes(s));
            for (int i = 0; i < UNIT_KEYS; i++) {
                int there = key + i < written;
                block->key_scales[u * UNIT_KEYS + i] = there ? widened(scales[offset + i]) : 0;
                block->value_scales[u * UNIT_KEYS + i] =
                    there ? widened(scales[s->page_keys + offset + i]) : 0;
            }
        }
        if (block->copied) {
            char *to = wide + u * 4 * UNIT_KEYS * s->width;
            widen_unit(s, keys, values, to);
            keys = to, values = to + 2 * UNIT_KEYS * s->width;
        }
        for (int v = 0; v < UNIT_VECS; v++)
            block->keys[u * UNIT_VECS + v] = keys + v * LANES * 4;
        block->values[u] = values;
    }
}

/* Point to the units of the block from key `start` as the next ones; behind the last block to those
   of the task that follows. */
INLINE void take_next(const row_task *t, const row_task *after, int64_t head, int64_t start,
                      key_block *block) {
    const page_store *s = t->store;
    int64_t last = t->span->start + t->to - 1;
    if (after && (start > last || start >= t->part_to * PART_KEYS)) {
        t = after;
        last = t->span->start + t->to - 1;
        start = t->part_from * PART_KEYS;
        if (head >= t->head_to) head = t->head_from;
    }
    for (int u = 0; u < BLOCK_UNITS; u++) {
        int64_t key = start + u * UNIT_KEYS;
        int32_t page = key <= last ? t->table[key / s->page_keys] : -1;
        block->next_keys[u] = block->keys[0];
        block->next_values[u] = block->values[0];
        if (page < 0 || block->copied) continue;
        block->next_keys[u] =
            head_of(s, page, head) + key % s->page_keys / UNIT_KEYS * unit_bytes(s);
        block->next_values[u] = block->next_keys[u] + half_bytes(s);
    }
}

/* Products with the values fetch as many units of the next block as they have themselves. */
INLINE void fetch_rest(const page_store *s, const key_block *block) {
    for (int u = block->units; u < BLOCK_UNITS; u++)
        if (block->next_values[u] != block->values[0])
            for (int64_t i = 0; i < unit_bytes(s); i += LINE_BYTES)
                fetch(block->next_values[u] + i);
}

/* Scores of one row to weights; returns by how much what was summed before fades. */
INLINE float weigh(const row_task *t, const key_block *block, int units, int64_t position,
                   float *scores, uint32_t *weights, float *top, float *sums, float step,
                   enum products products) {
    const page_span *span = t->span;
    int64_t low = window_start(span, position);
    vec factor = v_set(t->batch->scale * 1.44269504f * step), most = v_set(-INFINITY);
    for (int u = 0; u < units; u++) {
        float *s = scores + u * UNIT_KEYS;
        for (int v = 0; v < UNIT_KEYS; v += LANES) {
            vec x = v_mul(v_load(s + v), factor);
            if (block->scaled) x = v_mul(x, v_load(block->key_scales + u * UNIT_KEYS + v));
            v_store(s + v, x);
        }
        int64_t first = block->first[u];
        if (first + UNIT_KEYS - 1 > position || first < low)
            for (int i = 0; i < UNIT_KEYS; i++) {
                int64_t key = first + i;
                int seen = (key <= position) & ((key >= low) | (key < span->sink));
                s[i] = seen ? s[i] : -INFINITY;
            }
        for (int v = 0; v < UNIT_KEYS; v += LANES) most = v_max(most, v_load(s + v));
    }
    float here = v_largest(most), before = *top, now = here > before ? here : before;
    float base = now == -INFINITY ? 0.0f : now;
    vec down = v_set(base), total = v_load(sums);
    float fade = before == now ? 1.0f : exp2_one(before - base);
    total = v_mul(total, v_set(fade));
    for (int u = 0; u < units; u++)
        for (int v = 0; v < UNIT_KEYS; v += LANES) {
            int i = u * UNIT_KEYS + v;
            vec p = exp2_of(v_sub(v_load(scores + i), down));
            total = v_add(total, p);
            if (block->scaled) p = v_mul(p, v_load(block->value_scales + i));
            if (products == PRODUCTS_BYTES) v_store(scores + i, p);
            else if (products == PRODUCTS_F32) v_store((float *)weights + i, p);
            else if (widens_rows(products)) v_store((float *)weights + i, v_to_bf16(p));
            else store_pairs((bf16 *)weights + i, p);
        }
    v_store(sums, total);
    *top = now;
    return fade;
}

enum { SCORES = TILE_ROWS * BLOCK_KEYS };

/* The last columns may be fewer. */
INLINE int vecs_from(int64_t width, int64_t column) {
    int64_t left = (width - column) / LANES;
    return left < TILE_VECS ? (int)left : TILE_VECS;
}

/* Add a block to `count` rows from `row`. */
INLINE void add_block(const row_task *t, const key_block *block, int64_t row, int count,
                      const row_space *w, enum products products) {
    const int64_t width = t->store->width, last = position_of(t, row + count - 1);
    const int wide = products == PRODUCTS_F32, bytes = products == PRODUCTS_BYTES;
    int units = 0;
    while (units < block->units && block->first[units] <= last) units++;
    if (!units) return;
    float scores[SCORES] __attribute__((aligned(64)));
    uint32_t weights[SCORES] __attribute__((aligned(64)));
    float fade[TILE_ROWS], step[TILE_ROWS];
    int32_t bias[TILE_ROWS];
    const int64_t stride = row_words(t, products);
    const uint32_t *queries = w->queries + row * stride;
    for (int v = 0; v < units * UNIT_VECS; v += TILE_VECS) {
        int vecs = vecs_from(units * UNIT_KEYS, v * LANES);
        float *to = scores + v * LANES;
        if (bytes)
            score_bytes(count, vecs, width / 4, queries, t->words, w->biases + row,
                        block->keys + v, block->next_keys, to);
        else
            score_rows(count, vecs, t->words, queries, stride, block->keys + v,
                       block->next_keys, to, wide);
    }
    /* A position is a division by the group: of the first row only. */
    int64_t place = row % rows_per_head(t) % t->group, position = position_of(t, row);
    for (int r = 0; r < count; r++, place++) {
        if (place == t->group) place = 0, position++;
        float *own = scores + r * BLOCK_KEYS;
        uint32_t *to = weights + r * BLOCK_KEYS;
        fade[r] = weigh(t, block, units, position, own, to, w->tops + row + r,
                        w->sums + (row + r) * LANES, bytes ? w->steps[row + r] : 1.0f, products);
        if (bytes) step[r] = split_row(own, units * UNIT_KEYS, 4 * BYTE_WORDS, to, bias + r);
    }
    int64_t in_last = last + 1 - block->first[units - 1];
    int64_t keys = (units - 1) * UNIT_KEYS + (in_last < UNIT_KEYS ? in_last : UNIT_KEYS);
    for (int64_t column = 0; column < width; column += TILE_VECS * LANES) {
        const char *values[BLOCK_UNITS], *next[BLOCK_UNITS];
        for (int u = 0; u < units; u++) {
            values[u] = block->values[u] + column * 4;
            next[u] = block->next_values[u] + column * 4;
        }
        float *acc = w->accs + row * width + column;
        int vecs = vecs_from(width, column);
        if (bytes)
            mix_bytes(count, vecs, (keys + 3) / 4, weights, bias, step, values, next, width * 4,
                      fade, acc, width);
        else
            mix_rows(count, vecs, wide ? keys : (keys + 1) / 2, weights, values, next, width * 4,
                     fade, acc, width, wide);
    }
}
