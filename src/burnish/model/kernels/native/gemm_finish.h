/* What happens to the sums of a product: rounded, added to, gated, or kept in fp32. */
#pragma once

#define PANEL 16
#define PANEL_VECS (PANEL / LANES)

static inline int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

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
