/* Sums of products where the CPU has an instruction for bf16 pairs. */
#pragma once
#include "gemm_finish.h"

/* Sums of `R` rows and `P` panels of one group; R and P are constants after inlining, and the sums
   stay in registers. `stride` counts from one row of x to the next, `step` from panel to panel. */
static inline __attribute__((always_inline)) void sum_tile(const int R, const int P, const bf16 *x,
                                                           int64_t stride, const bf16 *w,
                                                           int64_t step, int64_t pairs,
                                                           float sums[][MAX_PANELS * PANEL]) {
    vec acc[MAX_ROWS][MAX_PANELS * PANEL_VECS];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int c = 0; c < P * PANEL_VECS; c++) acc[r][c] = v_zero();
    for (int64_t k = 0; k < pairs; k++) {
        weights both[MAX_PANELS * PANEL_VECS];
#pragma GCC unroll 16
        for (int c = 0; c < P * PANEL_VECS; c++)
            both[c] = load_weights(w + (c / PANEL_VECS) * step + k * 2 * PANEL +
                                   (c % PANEL_VECS) * 2 * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            inputs pair = load_inputs(x + r * stride + 2 * k);
#pragma GCC unroll 16
            for (int c = 0; c < P * PANEL_VECS; c++)
                acc[r][c] = add_products(acc[r][c], both[c], pair);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int c = 0; c < P * PANEL_VECS; c++) v_store(sums[r] + c * LANES, acc[r][c]);
}

static void sum_any(int rows, int panels, const bf16 *x, int64_t stride, const bf16 *w,
                    int64_t step, int64_t pairs, float sums[][MAX_PANELS * PANEL]) {
#define CASE(R, P)                                                                               \
    case 16 * (P) + (R):                                                                         \
        sum_tile(R, P, x, stride, w, step, pairs, sums);                                         \
        break;
    switch (16 * panels + rows) {
        ALL_TILES(CASE)
        default: __builtin_unreachable();
    }
#undef CASE
}

static void multiply_part(const struct product *p, int64_t first, int64_t last, int64_t row_start,
                          int64_t row_end) {
    int64_t pairs = (p->matrix->inputs + 1) / 2, step = pairs * 2 * PANEL;
    for (int64_t panel = first; panel < last;) {
        int count = last - panel >= MAX_PANELS ? MAX_PANELS : last - panel >= 2 ? 2 : 1;
        for (int64_t row = row_start; row < row_end;) {
            float sums[MAX_ROWS][MAX_PANELS * PANEL];
            int rows = row_end - row < MAX_ROWS ? (int)(row_end - row) : MAX_ROWS;
            sum_any(rows, count, p->x + row * p->stride, p->stride,
                    p->matrix->panels + panel * step, step, pairs, sums);
            finish(p, row, rows, panel, count, sums);
            row += rows;
        }
        panel += count;
    }
}
