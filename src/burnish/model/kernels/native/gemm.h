/* Products of few or many rows with a packed matrix.

   A matrix [outputs, inputs] lies in panels of 16 outputs: [panel][input pair][16][2]. One load gives
   sixteen outputs' weights of two inputs, which is what a dot product of bf16 pairs takes. An output
   is one chain of additions over the inputs in order, whatever the number of rows: this alone makes
   a row's bits independent of its batch. `multiply_part`, included before, computes the sums. */
#pragma once
#include <omp.h>
#include <string.h>

/* What thread `mine` of `team` does. They share out the panels, so that each weight is read by one of
   them; with more threads than panels the rows are shared out too. */
static void multiply_share(const struct product *p, int64_t mine, int64_t team) {
    int unit = p->then == GATE ? 2 : 1;
    int64_t units = panels_of(p->matrix->outputs), row_parts = 1;
    while (units * row_parts < team && row_parts * MAX_ROWS < p->rows) row_parts++;
    int64_t parts = team < units ? team : units;
    for (int64_t i = mine; i < row_parts * parts; i += team) {
        int64_t a = i / parts, b = i % parts;
        multiply_part(p, b * units / parts * unit, (b + 1) * units / parts * unit,
                      a * p->rows / row_parts, (a + 1) * p->rows / row_parts);
    }
}

static void multiply(const struct product *p, int num_threads) {
    /* Below this many products starting the others costs more than it saves. */
    int shared = p->rows * p->matrix->inputs * p->matrix->outputs > 32768;
#pragma omp parallel num_threads(num_threads) if (shared)
    multiply_share(p, omp_get_thread_num(), omp_get_num_threads());
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
