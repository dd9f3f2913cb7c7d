/* Products of bf16 pages by tiles: 16 rows with 16 keys (or 16 columns) at a time.

   A product takes 32 numbers: its even and its odd ones are a chain each, both are added and then
   added to the sum. That order is another than in attention_tile.h, so the last bits are others too.
   It still is fixed: numbers and keys are taken in groups of 32 from 0, and a row's sums see no other
   row. Rows that lack neighbours to fill a tile are computed with whatever lies behind them. */
#pragma once
#include "attention_rows.h"

#if HAS_TILES
enum {
    TILED_ROWS = 16,
    CHUNK_KEYS = 32,
    CHUNKS = BLOCK_KEYS / CHUNK_KEYS,
    QUERY_STEP = 16,
    WEIGHT_WORDS = BLOCK_KEYS / 2,
    MIXED_COLUMNS = 64,
    /* Shorter spans would leave most of a tile empty: a token of SmolLM2 has 3 rows per head. Spans
       that check guesses are shorter. */
    TILED_TOKENS = 32
};

/* All tiles are whole. It must not lie on the stack, see tiles.h. */
static const tile_shapes WHOLE_TILES = {.palette = 1,
                                        .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                                        .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

/* Of this thread. */
INLINE void begin_tiles(void) { tiles_open(&WHOLE_TILES); }
INLINE void end_tiles(void) { tiles_close(); }

/* Which pages can be multiplied so at all. */
INLINE int tiles_fit(const page_store *s) {
    return s->kind == PAGE_BF16 && s->width % (2 * QUERY_STEP) == 0;
}
INLINE int is_tiled(const page_span *span) { return span->count >= TILED_TOKENS; }

/* Values of a block: 16 rows of pairs per chunk, NULL where no key is there. */
typedef struct {
    const char *chunks[CHUNKS];
} value_chunks;

INLINE int64_t chunk_bytes(const page_store *s) { return CHUNK_KEYS * s->width * 2; }

/* Copy a unit, with zeros for what nobody wrote: a weight of zero times NaN is NaN. */
INLINE void copy_unit(const page_store *s, const char *unit, int64_t first, int64_t written,
                      char *to) {
    int64_t row = s->width * 4, pairs = (written - first + 1) / 2;
    if (pairs > UNIT_KEYS / 2) pairs = UNIT_KEYS / 2;
    memcpy(to, unit, (size_t)(pairs * row));
    memset(to + pairs * row, 0, (size_t)((UNIT_KEYS / 2 - pairs) * row));
}

/* Chunks lie at absolute positions, whatever the rows of the task see. Two units that are whole and
   neighbours in memory are used where they are, others are copied to `space`. */
INLINE void take_chunks(const row_task *t, const key_block *block, int64_t start, char *space,
                        value_chunks *values) {
    const page_store *s = t->store;
    const int64_t written = t->span->start + t->span->count, bytes = unit_bytes(s);
    int u = 0;
    for (int c = 0; c < CHUNKS; c++, space += chunk_bytes(s)) {
        int64_t first = start + c * CHUNK_KEYS;
        int from = u;
        while (u < block->units && block->first[u] < first + CHUNK_KEYS) u++;
        values->chunks[c] = NULL;
        if (u == from) continue;
        values->chunks[c] = block->values[from];
        if (u - from == 2 && block->values[from + 1] == block->values[from] + bytes &&
            first + CHUNK_KEYS <= written)
            continue;
        if (u - from < 2) memset(space, 0, (size_t)chunk_bytes(s));
        for (int i = from; i < u; i++)
            copy_unit(s, block->values[i], block->first[i], written,
                      space + (block->first[i] - first) / UNIT_KEYS * bytes);
        values->chunks[c] = space;
    }
}

INLINE void fetch_block(const page_store *s, const key_block *block) {
    for (int u = 0; u < BLOCK_UNITS; u++)
        for (int64_t i = 0; i < unit_bytes(s); i += LINE_BYTES) {
            fetch(block->next_keys[u] + i);
            fetch(block->next_values[u] + i);
        }
}

/* Scores of 16 rows with up to four units of keys, which tiles 0 to 3 sum up. */
INLINE void score_tiles(const key_block *block, int units, const uint32_t *queries, int64_t words,
                        float *scores) {
    const int64_t stride = words * 4;
#define KEYS(u) (block->keys[(u)*UNIT_VECS] + s * LINE_BYTES)
#define ADD_KEYS(u, tile)                                                                          \
    if (units > u) {                                                                               \
        tile_load(tile, KEYS(u), LINE_BYTES);                                                      \
        tile_dot(u, 4, tile);                                                                      \
    }
#define STORE_SCORES(u)                                                                            \
    if (units > u) tile_store(u, scores + (u)*UNIT_KEYS, BLOCK_KEYS * 4)
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int64_t s = 0; s < words; s += QUERY_STEP) {
        tile_load(4, queries + s, stride);
        ADD_KEYS(0, 5)
        ADD_KEYS(1, 6)
        ADD_KEYS(2, 7)
        ADD_KEYS(3, 5)
    }
    STORE_SCORES(0);
    STORE_SCORES(1);
    STORE_SCORES(2);
    STORE_SCORES(3);
#undef KEYS
#undef ADD_KEYS
#undef STORE_SCORES
}

/* Weights of the units that are there lie side by side: move each to the place of its keys. What it
   leaves behind meets the zeros of a unit that is not there. */
INLINE void spread_weights(const key_block *block, int units, int64_t start, bf16 *weights) {
    for (int u = units - 1; u >= 0; u--) {
        int64_t place = (block->first[u] - start) / UNIT_KEYS;
        if (place != u)
            memcpy(weights + place * UNIT_KEYS, weights + u * UNIT_KEYS, UNIT_KEYS * sizeof(bf16));
    }
}

/* weights . values for 16 rows and up to 64 columns from `column`. */
INLINE void mix_tiles(const value_chunks *values, const uint32_t *weights, int64_t column, int tiles,
                      int64_t width, float *mixed) {
#define VALUES(i) (values->chunks[c] + (column + (i)*UNIT_KEYS) * 4)
#define ADD_VALUES(i, tile)                                                                        \
    if (tiles > i) {                                                                               \
        tile_load(tile, VALUES(i), width * 4);                                                     \
        tile_dot(i, 4, tile);                                                                      \
    }
#define STORE_MIXED(i)                                                                             \
    if (tiles > i) tile_store(i, mixed + (i)*UNIT_KEYS, MIXED_COLUMNS * 4)
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int c = 0; c < CHUNKS; c++) {
        if (!values->chunks[c]) continue;
        tile_load(4, weights + c * CHUNK_KEYS / 2, WEIGHT_WORDS * 4);
        ADD_VALUES(0, 5)
        ADD_VALUES(1, 6)
        ADD_VALUES(2, 7)
        ADD_VALUES(3, 5)
    }
    STORE_MIXED(0);
    STORE_MIXED(1);
    STORE_MIXED(2);
    STORE_MIXED(3);
#undef VALUES
#undef ADD_VALUES
#undef STORE_MIXED
}

/* As add_block, for `count` of up to 16 rows. */
INLINE void add_tiled(const row_task *t, const key_block *block, const value_chunks *values,
                      int64_t start, int64_t row, int count, const row_space *w) {
    const int64_t width = t->store->width, last = position_of(t, row + count - 1);
    int units = 0;
    while (units < block->units && block->first[units] <= last) units++;
    if (!units) return;
    /* Rows beyond `count`, and keys that no row of these sees yet, have weights of zero. */
    float scores[TILED_ROWS * BLOCK_KEYS] __attribute__((aligned(64)));
    uint32_t weights[TILED_ROWS * WEIGHT_WORDS] __attribute__((aligned(64))) = {0};
    float fade[TILED_ROWS];
    score_tiles(block, units, w->queries + row * t->words, t->words, scores);
    for (int r = 0; r < count; r++) {
        uint32_t *to = weights + r * WEIGHT_WORDS;
        fade[r] = weigh(t, block, units, position_of(t, row + r), scores + r * BLOCK_KEYS, to,
                        w->tops + row + r, w->sums + (row + r) * LANES, 1.0f, PRODUCTS_TILES);
        spread_weights(block, units, start, (bf16 *)to);
    }
    /* The scores are used up: their room takes the products. */
    for (int64_t column = 0; column < width; column += MIXED_COLUMNS) {
        int64_t columns = width - column < MIXED_COLUMNS ? width - column : MIXED_COLUMNS;
        mix_tiles(values, weights, column, (int)(columns / UNIT_KEYS), width, scores);
        for (int r = 0; r < count; r++) {
            float *acc = w->accs + (row + r) * width + column;
            for (int64_t i = 0; i < columns; i += LANES)
                v_store(acc + i, v_fma(v_set(fade[r]), v_load(acc + i),
                                       v_load(scores + r * MIXED_COLUMNS + i)));
        }
    }
}
#else
INLINE void begin_tiles(void) {}
INLINE void end_tiles(void) {}
#endif
