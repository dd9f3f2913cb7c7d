/* All rows of a task over parts of its keys, and putting parts together. */
#pragma once
#include "attention_tiles.h"

INLINE int rows_at_once(enum products products) {
#if HAS_TILES
    if (products == PRODUCTS_TILES) return TILED_ROWS;
#endif
    return products == PRODUCTS_BYTES ? BYTE_ROWS : TILE_ROWS;
}

/* One part of the keys for all rows of the task, from nothing. */
INLINE void run_part(const row_task *t, const row_task *after, int64_t part, const row_space *w,
                     enum products products) {
    const int tile = rows_at_once(products);
    int64_t rows = rows_of(t), width = t->store->width;
    for (int64_t r = 0; r < rows; r++) w->tops[r] = -INFINITY;
    memset(w->sums, 0, sizeof(float) * (size_t)(rows * LANES));
    memset(w->accs, 0, sizeof(float) * (size_t)(rows * width));
    int64_t end = t->span->start + t->to, stop = (part + 1) * PART_KEYS;
    if (end > stop) end = stop;
    int64_t low = window_start(t->span, t->span->start + t->from) / BLOCK_KEYS * BLOCK_KEYS;
    for (int64_t start = part * PART_KEYS; start < end; start += BLOCK_KEYS) {
        if (start >= t->span->sink && start < low) start = low;
        if (start >= end) break;
        /* Head by head within a block: the heads of a page lie side by side. */
        for (int64_t head = t->head_from; head < t->head_to; head++) {
            key_block block;
            take_block(t, head, start, w->wide, &block, products);
            if (!block.units) continue;
            take_next(t, after, head, start + BLOCK_KEYS, &block);
            int64_t row = (head - t->head_from) * rows_per_head(t), end_row = row + rows_per_head(t);
#if HAS_TILES
            value_chunks values;
            if (products == PRODUCTS_TILES) {
                take_chunks(t, &block, start, w->wide, &values);
                fetch_block(t->store, &block);
            }
#endif
            for (; row < end_row; row += tile) {
                int count = end_row - row < tile ? (int)(end_row - row) : tile;
#if HAS_TILES
                if (products == PRODUCTS_TILES) {
                    add_tiled(t, &block, &values, start, row, count, w);
                    continue;
                }
#endif
                add_block(t, &block, row, count, w, products);
            }
            if (products != PRODUCTS_TILES) fetch_rest(t->store, &block);
        }
    }
}

/* Merge a part into what came before it; `first` of all that saw any key is copied. */
INLINE void merge_row(int64_t width, float top, const float *sums, const float *acc,
                      float *all_top, float *all_sums, float *all_acc) {
    if (top == -INFINITY) return;
    if (*all_top == -INFINITY) {
        *all_top = top;
        memcpy(all_sums, sums, sizeof(float) * LANES);
        memcpy(all_acc, acc, sizeof(float) * (size_t)width);
        return;
    }
    float now = top > *all_top ? top : *all_top;
    vec old = v_set(exp2_one(*all_top - now)), new = v_set(exp2_one(top - now));
    v_store(all_sums, v_fma(v_load(sums), new, v_mul(v_load(all_sums), old)));
    for (int64_t i = 0; i < width; i += LANES)
        v_store(all_acc + i, v_fma(v_load(acc + i), new, v_mul(v_load(all_acc + i), old)));
    *all_top = now;
}

INLINE void finish_row(const row_task *t, int64_t row, float top, const float *sums,
                       const float *acc) {
    int64_t width = t->store->width, at = place_of(t, row);
    float sum = v_sum(v_load(sums));
    vec total = v_set(sum);
    if (t->batch->masses) t->batch->masses[at / width] = top * 0.69314718f + logf(sum);
    for (int64_t i = 0; i < width; i += LANES) {
        vec x = v_div(v_load(acc + i), total);
        if (t->batch->is_f32) v_store((float *)t->batch->out + at + i, x);
        else v_store_bf16((bf16 *)t->batch->out + at + i, x);
    }
}

/* Numbers of a row rounded to bf16, as pairs or `wide`. */
INLINE void take_row(const void *from, int is_f32, int64_t width, int wide, uint32_t *to) {
    if (!wide && !is_f32) {
        memcpy(to, from, (size_t)width * 2);
        return;
    }
    for (int64_t i = 0; i < width; i++) {
        bf16 x = is_f32 ? narrowed(((const float *)from)[i]) : ((const bf16 *)from)[i];
        if (wide) ((float *)to)[i] = widened(x);
        else ((bf16 *)to)[i] = x;
    }
}

/* Queries of the task's rows, one after the other, in the numbers of the products. */
INLINE void take_queries(const row_task *t, const row_space *w, enum products products) {
    int64_t rows = rows_of(t), width = t->store->width;
    for (int64_t row = 0; row < rows; row++) {
        int64_t at = place_of(t, row);
        uint32_t *words = w->queries + row * row_words(t, products);
        const void *from = (const char *)t->batch->queries + at * (t->batch->is_f32 ? 4 : 2);
        if (products == PRODUCTS_BYTES) {
            float plain[MAX_WIDTH];
            for (int64_t i = 0; i < width; i++)
                plain[i] = number_at(from, i, (int)t->batch->is_f32);
            w->steps[row] = split_row(plain, width, width, words, w->biases + row);
        } else if (products == PRODUCTS_F32) {
            memcpy(words, from, (size_t)t->words * 4);
        } else {
            take_row(from, (int)t->batch->is_f32, width, widens_rows(products), words);
        }
    }
}
