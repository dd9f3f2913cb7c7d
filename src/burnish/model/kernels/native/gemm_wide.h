/* Sums of products in fp32, for CPUs without an instruction for bf16 pairs.

   A bf16 number is the upper half of the fp32 number of the same value. Weights are widened as they
   are loaded, rows beforehand: between the multiplications that cost a third of the time. */
#pragma once
#include "gemm_finish.h"

/* Inputs of a row that lie side by side once they are wide. */
#define CHUNK 16

/* Wide rows of one thread, at its stack. Up to BLOCK they stay in a second-level cache; the rest is
   for matrices so wide that a tile's rows would not fit. */
enum { BLOCK = 64 << 10, ROOM = 128 << 10 };

/* Rows [rows][2 * pairs] as [chunk][row][CHUNK]. What the last chunk lacks is not read. */
static void widen(const bf16 *x, int64_t stride, int rows, int64_t pairs, float *out) {
    for (int64_t k = 0; k < 2 * pairs; k += CHUNK)
        for (int r = 0; r < rows; r++, out += CHUNK)
            for (int64_t i = 0; i < CHUNK && k + i < 2 * pairs; i += LANES) {
                int64_t left = 2 * pairs - k - i;
                const bf16 *from = x + r * stride + k + i;
                v_store(out + i, left < LANES ? v_load_bf16_n(from, left) : v_load_bf16(from));
            }
}

/* Sums of `R` rows and `P` panels; both are constants after inlining, and the sums stay in registers.
   `step` counts from panel to panel. */
static inline __attribute__((always_inline)) void sum_tile(const int R, const int P, const float *x,
                                                           const bf16 *w, int64_t step,
                                                           int64_t pairs, float *sums) {
    vec acc[MAX_ROWS][MAX_PANELS * PANEL_VECS];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int c = 0; c < P * PANEL_VECS; c++) acc[r][c] = v_zero();
    for (int64_t start = 0; start < pairs; start += CHUNK / 2, x += R * CHUNK) {
        int64_t count = pairs - start < CHUNK / 2 ? pairs - start : CHUNK / 2;
        for (int64_t k = 0; k < count; k++, w += 2 * PANEL)
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++) {
                vec weights[MAX_PANELS * PANEL_VECS];
#pragma GCC unroll 16
                for (int c = 0; c < P * PANEL_VECS; c++) {
                    vec both = v_load((const float *)(const void *)(w + c / PANEL_VECS * step +
                                                                    c % PANEL_VECS * 2 * LANES));
                    weights[c] = odd ? v_high_bf16(both) : v_low_bf16(both);
                }
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) {
                    vec input = v_set(x[r * CHUNK + 2 * k + odd]);
#pragma GCC unroll 16
                    for (int c = 0; c < P * PANEL_VECS; c++)
                        acc[r][c] = v_fma(weights[c], input, acc[r][c]);
                }
            }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int c = 0; c < P * PANEL_VECS; c++)
            v_store(sums + r * MAX_PANELS * PANEL + c * LANES, acc[r][c]);
}

static void sum_any(int rows, int panels, const float *x, const bf16 *w, int64_t step,
                    int64_t pairs, float *sums) {
#define CASE(R, P)                                                                               \
    case 16 * (P) + (R):                                                                         \
        sum_tile(R, P, x, w, step, pairs, sums);                                                 \
        break;
    switch (16 * panels + rows) {
        ALL_TILES(CASE)
        default: __builtin_unreachable();
    }
#undef CASE
}

/* `rows` rows that are wide already, from `row` on, in tiles of equal height. */
static void multiply_block(const struct product *p, int64_t first, int64_t last, int64_t row,
                           int64_t rows, int64_t tiles, const float *wide) {
    int64_t pairs = (p->matrix->inputs + 1) / 2, step = pairs * 2 * PANEL;
    int64_t width = (2 * pairs + CHUNK - 1) / CHUNK * CHUNK;
    for (int64_t panel = first; panel < last;) {
        int count = last - panel >= MAX_PANELS ? MAX_PANELS : last - panel >= 2 ? 2 : 1;
        for (int64_t t = 0; t < tiles; t++) {
            float sums[MAX_ROWS][MAX_PANELS * PANEL];
            int64_t from = t * rows / tiles;
            int height = (int)((t + 1) * rows / tiles - from);
            int most = height > FEW_ROWS ? PANELS_OF_MANY : MAX_PANELS;
            for (int c = 0; c < count; c += most)
                sum_any(height, count < most ? count : most, wide + from * width,
                        p->matrix->panels + (panel + c) * step, step, pairs, sums[0] + c * PANEL);
            finish(p, row + from, height, panel, count, sums);
        }
        panel += count;
    }
}

/* Apart, since `wide` is large: inlined more than once it could be there more than once. */
static __attribute__((noinline)) void multiply_part(const struct product *p, int64_t first,
                                                    int64_t last, int64_t row_start,
                                                    int64_t row_end) {
    float wide[ROOM] __attribute__((aligned(64)));
    int64_t pairs = (p->matrix->inputs + 1) / 2, width = (2 * pairs + CHUNK - 1) / CHUNK * CHUNK;
    int64_t most = BLOCK / width >= MAX_ROWS ? BLOCK / width : ROOM / width;
    if (most > MAX_ROWS) most -= most % MAX_ROWS;
    for (int64_t row = row_start; row < row_end;) {
        int64_t rows = row_end - row < most ? row_end - row : most;
        int64_t tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
        for (int64_t t = 0; t < tiles; t++) {
            int64_t from = t * rows / tiles, to = (t + 1) * rows / tiles;
            widen(p->x + (row + from) * p->stride, p->stride, (int)(to - from), pairs,
                  wide + from * width);
        }
        multiply_block(p, first, last, row, rows, tiles, wide);
        row += rows;
    }
}
