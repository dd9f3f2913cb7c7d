/* Attention over pages: cutting a step into tasks and sharing them among threads. */
#pragma once
#include <omp.h>
#include <stdlib.h>

#include "attention_parts.h"

/* Rows of one task: enough to use each block of keys many times while it is in the cache. */
enum { TASK_ROWS = 96, TASKS_PER_THREAD = 4 };

INLINE int64_t tokens_of_task(int64_t group) {
    return group < TASK_ROWS ? TASK_ROWS / group : 1;
}
INLINE int64_t parts_of(const page_span *span) {
    return (span->start + span->count + PART_KEYS - 1) / PART_KEYS;
}

/* How finely spans are cut, from the coarsest. Short spans keep their heads together as long as
   there are tasks enough: the heads of a page are neighbours in memory. */
enum cut { CUT_TOKENS, CUT_PARTS, CUT_HEADS, NUM_CUTS };

/* Tasks of all spans, written to `tasks` if it is not NULL; how many, and in `num_partial` how many
   rows x parts are merged later. */
static int64_t plan_tasks(const page_store *store, const query_batch *batch,
                          const page_span *spans, int64_t num_spans, const int32_t *tables,
                          enum cut cut, row_task *tasks, int64_t *num_partial) {
    int64_t group = batch->heads / store->heads, step = tokens_of_task(group), num = 0;
    *num_partial = 0;
    for (int64_t i = 0; i < num_spans; i++) {
        const page_span *span = spans + i;
        int64_t parts = parts_of(span);
        int by_parts = cut >= CUT_PARTS && span->count <= step && parts > 1;
        int together = cut < CUT_HEADS && span->count * batch->heads <= TASK_ROWS;
        int64_t heads = together ? store->heads : 1;
        /* The last tokens see most keys: they start first. */
        for (int64_t to = span->count; to > 0; to -= step)
            for (int64_t head = 0; head < store->heads; head += heads)
                for (int64_t part = 0; part < (by_parts ? parts : 1); part++) {
                    int64_t from = to > step ? to - step : 0;
                    int64_t seen = (span->start + to + PART_KEYS - 1) / PART_KEYS;
                    row_task t = {.store = store, .batch = batch, .span = span,
                                  .table = tables + span->table, .group = group,
                                  .words = store->width / (store->kind == PAGE_F32 ? 1 : 2),
                                  .head_from = head, .head_to = head + heads, .from = from,
                                  .to = to, .part_from = by_parts ? part : 0,
                                  .part_to = by_parts ? part + 1 : seen, .partial = -1};
                    if (by_parts) {
                        t.partial = *num_partial;
                        *num_partial += rows_of(&t);
                    }
                    if (tasks) tasks[num] = t;
                    num++;
                }
    }
    return num;
}

INLINE int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* Cut `memory` into a thread's space; returns its size. */
static int64_t lay_out(char *memory, const page_store *store, int64_t rows, row_space *space) {
    int64_t row = rows * 4, lanes = rows * LANES * 4, wide = rows * store->width * 4;
    int64_t copies = is_narrow(store->kind) ? 2 * BLOCK_KEYS * store->width * 2 : 0;
    int64_t queries = wide;
#if HAS_TILES
    copies = CHUNKS * chunk_bytes(store);
    queries += (TILED_ROWS - 1) * store->width * 2;
#endif
    int64_t sizes[] = {queries, row, lanes, wide, row, lanes, wide, row, row, copies}, at[11] = {0};
    for (int i = 0; i < 10; i++) at[i + 1] = at[i] + aligned(sizes[i]);
    *space = (row_space){(uint32_t *)(memory + at[0]), (float *)(memory + at[1]),
                         (float *)(memory + at[2]),    (float *)(memory + at[3]),
                         (float *)(memory + at[4]),    (float *)(memory + at[5]),
                         (float *)(memory + at[6]),    (float *)(memory + at[7]),
                         (int32_t *)(memory + at[8]),  memory + at[9]};
    return at[10];
}

/* `partials` holds, per row, LANES sums, `width` numbers and the top. */
INLINE int64_t partial_floats(const page_store *store) { return LANES + store->width + LANES; }

/* The keys of the task `after`, if there is one, are fetched towards the end. */
INLINE void run_task(const row_task *t, const row_task *after, const row_space *w,
                     float *partials, enum products products) {
    int64_t rows = rows_of(t), width = t->store->width;
    row_space part = *w;
    part.tops = w->part_tops, part.sums = w->part_sums, part.accs = w->part_accs;
    take_queries(t, w, products);
    for (int64_t r = 0; r < rows; r++) w->tops[r] = -INFINITY;
    /* Rows that see no key at all divide zero by zero. */
    memset(w->sums, 0, sizeof(float) * (size_t)(rows * LANES));
    memset(w->accs, 0, sizeof(float) * (size_t)(rows * width));
    for (int64_t p = t->part_from; p < t->part_to; p++) {
        run_part(t, after, p, &part, products);
        for (int64_t r = 0; r < rows; r++)
            merge_row(width, part.tops[r], part.sums + r * LANES, part.accs + r * width,
                      w->tops + r, w->sums + r * LANES, w->accs + r * width);
    }
    for (int64_t r = 0; r < rows; r++) {
        if (t->partial < 0) {
            finish_row(t, r, w->tops[r], w->sums + r * LANES, w->accs + r * width);
            continue;
        }
        float *to = partials + (t->partial + r) * partial_floats(t->store);
        memcpy(to, w->sums + r * LANES, sizeof(float) * LANES);
        memcpy(to + LANES, w->accs + r * width, sizeof(float) * (size_t)width);
        to[LANES + width] = w->tops[r];
    }
}

/* Put together the parts of the rows of the task `t`, which is the first of its parts. */
static void merge_parts(const row_task *t, const float *partials, const row_space *w) {
    int64_t rows = rows_of(t), width = t->store->width, floats = partial_floats(t->store);
    int64_t parts = parts_of(t->span);
    for (int64_t r = 0; r < rows; r++) {
        w->tops[0] = -INFINITY;
        memset(w->sums, 0, sizeof(float) * LANES);
        memset(w->accs, 0, sizeof(float) * (size_t)width);
        for (int64_t p = 0; p < parts; p++) {
            const float *from = partials + (t->partial + p * rows + r) * floats;
            merge_row(width, from[LANES + width], from, from + LANES, w->tops, w->sums, w->accs);
        }
        finish_row(t, r, w->tops[0], w->sums, w->accs);
    }
}

static void run_tasks(const row_task *tasks, int64_t num, float *partials, char *spaces,
                      int64_t space_bytes, int64_t rows, int num_threads) {
    const page_store *store = tasks->store;
    int64_t next = 0;
#pragma omp parallel num_threads(num_threads)
    {
        row_space w;
        int64_t mine;
        lay_out(spaces + omp_get_thread_num() * space_bytes, store, rows, &w);
        begin_tiles();
        for (;;) {
#pragma omp atomic capture
            mine = next++;
            if (mine >= num) break;
            /* Threads that are equally fast take turns: this is most likely the next one here. Short
               sequences have a single block, which nothing else would fetch in time. */
            const row_task *t = tasks + mine;
            const row_task *after = mine + num_threads < num ? t + num_threads : NULL;
#if HAS_TILES
            run_task(t, after, &w, partials, PRODUCTS_TILES);
#else
            if (store->kind == PAGE_F32) run_task(t, after, &w, partials, PRODUCTS_F32);
            else if (store->kind == PAGE_INT8)
                run_task(t, after, &w, partials, PRODUCTS_BYTES);
            else run_task(t, after, &w, partials, PRODUCTS_PAIRS);
#endif
        }
        end_tiles();
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num; i++)
            if (tasks[i].partial >= 0 && tasks[i].part_from == 0)
                merge_parts(tasks + i, partials, &w);
    }
}

/* 0, or -1 without memory. */
static int attend(const page_store *store, const query_batch *batch, const page_span *spans,
                  int64_t num_spans, const int32_t *tables, int num_threads) {
    int64_t group = batch->heads / store->heads, num_partial;
    int64_t num = 0;
    enum cut cut = CUT_TOKENS;
    for (;; cut++) {
        num = plan_tasks(store, batch, spans, num_spans, tables, cut, NULL, &num_partial);
        if (num >= TASKS_PER_THREAD * num_threads || cut == NUM_CUTS - 1) break;
    }
    if (!num) return 0;
    int64_t most = 0, rows;
    for (int64_t i = 0; i < num_spans; i++) most = spans[i].count > most ? spans[i].count : most;
    if (most > tokens_of_task(group)) most = tokens_of_task(group);
    rows = most * group > TASK_ROWS ? most * group : TASK_ROWS;
    row_space unused;
    int64_t space = lay_out(NULL, store, rows, &unused);
    int64_t partial_bytes = aligned(num_partial * partial_floats(store) * 4);
    row_task *tasks = malloc(sizeof(row_task) * (size_t)num);
    char *memory = aligned_alloc(64, (size_t)(space * num_threads + partial_bytes));
    if (tasks && memory) {
        plan_tasks(store, batch, spans, num_spans, tables, cut, tasks, &num_partial);
        run_tasks(tasks, num, (float *)(memory + space * num_threads), memory, space, rows,
                  num_threads);
    }
    int failed = !tasks || !memory;
    free(tasks);
    free(memory);
    return failed ? -1 : 0;
}

#if !HAS_TILES
int FOR_ISA(attend_pages)(const page_store *store, const query_batch *batch,
                          const page_span *spans, int64_t num_spans, const int32_t *tables,
                          int num_threads) {
    return attend(store, batch, spans, num_spans, tables, num_threads);
}
#endif
