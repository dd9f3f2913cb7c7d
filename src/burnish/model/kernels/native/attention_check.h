/* A small problem of attention by tiles and without: whether they agree on this machine. */
#pragma once
#include "attention_run.h"

/* Two heads of queries on one of keys, spans that begin in the middle of a unit and end in another,
   pages in an order of their own: every branch of attention_tiles.h. */
enum { CHECK_WIDTH = 96, CHECK_PAGES = 5, CHECK_PAGE_KEYS = 32, CHECK_PAST = 37, CHECK_TOKENS = 70 };
enum { CHECK_NUMBERS = 2 * CHECK_TOKENS * CHECK_WIDTH };

typedef struct {
    float queries[CHECK_NUMBERS], plain[CHECK_NUMBERS], tiled[CHECK_NUMBERS];
    float keys[(CHECK_PAST + CHECK_TOKENS) * CHECK_WIDTH];
    float values[(CHECK_PAST + CHECK_TOKENS) * CHECK_WIDTH];
    int64_t slots[CHECK_PAST + CHECK_TOKENS];
    bf16 narrow[2][(CHECK_PAST + CHECK_TOKENS) * CHECK_WIDTH];
    char pages[CHECK_PAGES * 2 * CHECK_PAGE_KEYS * CHECK_WIDTH * 2] __attribute__((aligned(64)));
} check_space;

/* Numbers in [-scale, scale), always the same. */
static void fill(float *to, int64_t count, float scale, uint32_t seed) {
    for (int64_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        to[i] = ((float)(seed >> 8) * 0x1p-23f - 1.0f) * scale;
    }
}

/* Values are below 1 and weights sum up to 1. Scores agree to 1e-5, so a weight may be rounded to the
   neighbouring bf16 number, 2^-8 of it away. */
static const float CHECK_BOUND = 0x1p-8f;

static int agree(const float *a, const float *b) {
    int same = 1;
    for (int64_t i = 0; i < CHECK_NUMBERS; i++) same &= fabsf(a[i] - b[i]) <= CHECK_BOUND;
    return same;
}

/* 0 if both agree, 1 if not, 2 without memory. An illegal instruction ends the process: call this in
   one of its own. */
int burnish_check_tiles(void) {
    static const int32_t table[] = {3, 0, 4, 2};
    check_space *c = aligned_alloc(64, (size_t)aligned(sizeof *c));
    if (!c) return 2;
    /* What is not written must not be used: NaN in bf16. */
    memset(c->pages, 0xff, sizeof c->pages);
    page_store store = {.data = c->pages, .page_keys = CHECK_PAGE_KEYS, .heads = 1,
                        .width = CHECK_WIDTH, .kind = PAGE_BF16};
    const int64_t keys = CHECK_PAST + CHECK_TOKENS;
    for (int64_t i = 0; i < keys; i++)
        c->slots[i] = (int64_t)table[i / CHECK_PAGE_KEYS] * CHECK_PAGE_KEYS + i % CHECK_PAGE_KEYS;
    fill(c->queries, CHECK_NUMBERS, 4.0f, 1);
    fill(c->keys, keys * CHECK_WIDTH, 1.0f, 2);
    fill(c->values, keys * CHECK_WIDTH, 1.0f, 3);
    for (int64_t i = 0; i < keys * CHECK_WIDTH; i++)
        c->narrow[0][i] = narrowed(c->keys[i]), c->narrow[1][i] = narrowed(c->values[i]);
    FOR_OTHERS(write_pages)(&store, c->slots, keys, c->narrow[0], CHECK_WIDTH, c->narrow[1],
                            CHECK_WIDTH, 0, 1);
    page_span span = {.first = 0, .count = CHECK_TOKENS, .start = CHECK_PAST, .window = 50,
                      .sink = 5};
    query_batch batch = {.queries = c->queries, .out = c->plain, .heads = 2, .is_f32 = 1,
                         .scale = 0.102062073f};
    int failed = FOR_OTHERS(attend_pages)(&store, &batch, &span, 1, table, 1);
    batch.out = c->tiled;
    failed |= FOR_ISA(attend_pages)(&store, &batch, &span, 1, table, 1);
    int result = failed ? 2 : !agree(c->plain, c->tiled);
    free(c);
    return result;
}
