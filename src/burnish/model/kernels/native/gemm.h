/* Products of few or many rows with a packed matrix.

   A matrix [outputs, inputs] lies in panels of 16 outputs: [panel][input pair][16][2]. One load gives
   sixteen outputs' weights of two inputs, which is what a dot product of bf16 pairs takes. An output
   is one chain of additions over the inputs in order, whatever the number of rows: this alone makes
   a row's bits independent of its batch. */
#pragma once
#include <string.h>

#define PANEL 16
#define PANEL_VECS (PANEL / LANES)

static inline int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

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

/* What happens to a finished sum. */
enum { ROUND, ADD, GATE, KEEP32 };

struct product {
    const bf16 *x;
    int64_t rows, stride;
    const struct matrix *matrix;
    int then;
    bf16 *out; /* ADD: also what is added to */
    float *out32;
    int64_t out_stride;
};

/* Sixteen outputs of a row from `at` on. */
static void finish_panel(const struct product *p, int64_t row, int64_t at, const float *sums) {
    int64_t count = p->matrix->outputs - at;
    for (int64_t i = 0; i < PANEL && i < count; i += LANES) {
        int64_t n = count - i < LANES ? count - i : LANES;
        vec sum = v_load(sums + i);
        if (p->matrix->bias) sum = v_add(sum, v_load_bf16_n(p->matrix->bias + at + i, n));
        if (p->then == KEEP32) {
            v_store_n(p->out32 + row * p->out_stride + at + i, sum, n);
            continue;
        }
        bf16 *out = p->out + row * p->out_stride + at + i;
        if (p->then == ADD) sum = v_add(v_load_bf16_n(out, n), v_to_bf16(sum));
        v_store_bf16_n(out, sum, n);
    }
}

/* Panels alternate: sixteen of the gate, then the same sixteen of what it scales. */
static void finish_gate(const struct product *p, int64_t row, int64_t at, const float *sums) {
    const bf16 *bias = p->matrix->bias;
    int64_t count = p->matrix->outputs - at;
    for (int64_t i = 0; i < PANEL && i < count; i += LANES) {
        int64_t n = count - i < LANES ? count - i : LANES;
        vec gate = v_load(sums + i), up = v_load(sums + PANEL + i);
        if (bias) {
            gate = v_add(gate, v_load_bf16_n(bias + at + i, n));
            up = v_add(up, v_load_bf16_n(bias + p->matrix->outputs + at + i, n));
        }
        gate = v_to_bf16(v_silu(v_to_bf16(gate)));
        v_store_bf16_n(p->out + row * p->out_stride + at + i, v_mul(gate, v_to_bf16(up)), n);
    }
}

/* The same for rows whose panels are all there and have no bias, as most are: what comes after the
   sums took 6 % of all the time in single steps. `then` is a constant after inlining. */
static inline __attribute__((always_inline)) void finish_whole(const int then,
                                                               const struct product *p, int64_t row,
                                                               int rows, int64_t panel,
                                                               float sums[][MAX_PANELS * PANEL]) {
    for (int r = 0; r < rows; r++) {
        const float *from = sums[r];
        int64_t at = (row + r) * p->out_stride + panel * PANEL;
#pragma GCC unroll 16
        for (int i = 0; i < MAX_PANELS * PANEL; i += LANES) {
            vec sum = v_load(from + i);
            if (then == KEEP32) {
                v_store(p->out32 + at + i, sum);
                continue;
            }
            bf16 *out = p->out + at + i;
            if (then == ADD) sum = v_add(v_load_bf16(out), v_to_bf16(sum));
            v_store_bf16(out, sum);
        }
    }
}

static void finish_whole_gate(const struct product *p, int64_t row, int rows, int64_t panel,
                              float sums[][MAX_PANELS * PANEL]) {
    for (int r = 0; r < rows; r++) {
        bf16 *out = p->out + (row + r) * p->out_stride + panel / 2 * PANEL;
#pragma GCC unroll 16
        for (int i = 0; i < MAX_PANELS / 2 * PANEL; i += LANES) {
            const float *from = sums[r] + i / PANEL * 2 * PANEL + i % PANEL;
            vec gate = v_to_bf16(v_silu(v_to_bf16(v_load(from))));
            v_store_bf16(out + i, v_mul(gate, v_to_bf16(v_load(from + PANEL))));
        }
    }
}

/* Sums of `rows` rows from `row` and `count` panels from `panel`, to where they belong. */
static void finish(const struct product *p, int64_t row, int rows, int64_t panel, int count,
                   float sums[][MAX_PANELS * PANEL]) {
    int64_t end = (panel + count) / (p->then == GATE ? 2 : 1) * PANEL;
    if (count == MAX_PANELS && end <= p->matrix->outputs && !p->matrix->bias) {
        switch (p->then) {
            case ROUND: finish_whole(ROUND, p, row, rows, panel, sums); break;
            case ADD: finish_whole(ADD, p, row, rows, panel, sums); break;
            case KEEP32: finish_whole(KEEP32, p, row, rows, panel, sums); break;
            default: finish_whole_gate(p, row, rows, panel, sums);
        }
        return;
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < count; c++)
            if (p->then != GATE) finish_panel(p, row + r, (panel + c) * PANEL, sums[r] + c * PANEL);
            else if (c % 2 == 0)
                finish_gate(p, row + r, (panel + c) / 2 * PANEL, sums[r] + c * PANEL);
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

/* Threads share out the panels, so that each weight is read by one of them; with more threads than
   panels the rows are shared out too. */
static void multiply(const struct product *p, int num_threads) {
    int unit = p->then == GATE ? 2 : 1;
    int64_t units = panels_of(p->matrix->outputs), row_parts = 1;
    while (units * row_parts < num_threads && row_parts * MAX_ROWS < p->rows) row_parts++;
    int64_t parts = num_threads < units ? num_threads : units;
    /* Below this many products starting the others costs more than it saves. */
    int shared = p->rows * p->matrix->inputs * p->matrix->outputs > 32768;
#pragma omp parallel for collapse(2) schedule(static) num_threads(num_threads) if (shared)
    for (int64_t a = 0; a < row_parts; a++)
        for (int64_t b = 0; b < parts; b++)
            multiply_part(p, b * units / parts * unit, (b + 1) * units / parts * unit,
                          a * p->rows / row_parts, (a + 1) * p->rows / row_parts);
}

void FOR_ISA(linear)(const bf16 *x, int64_t rows, int64_t stride, const struct matrix *matrix,
                     bf16 *out, int64_t out_stride, int add, int num_threads) {
    struct product p = {x, rows, stride, matrix, add ? ADD : ROUND, out, 0, out_stride};
    multiply(&p, num_threads);
}

void FOR_ISA(linear_fp32)(const bf16 *x, int64_t rows, int64_t stride, const struct matrix *matrix,
                          float *out, int64_t out_stride, int num_threads) {
    struct product p = {x, rows, stride, matrix, KEEP32, 0, out, out_stride};
    multiply(&p, num_threads);
}

void FOR_ISA(gated_linear)(const bf16 *x, int64_t rows, int64_t stride,
                           const struct matrix *matrix, bf16 *out, int64_t out_stride,
                           int num_threads) {
    struct product p = {x, rows, stride, matrix, GATE, out, 0, out_stride};
    multiply(&p, num_threads);
}
