/* A decoder's layer around its attention, as two calls of one parallel region each. Rows and panels
   are shared out evenly: a thread's part of one step is what others read in the next. */
#pragma once
#include "team.h"

/* Rows of one thread. */
struct share {
    int64_t from, count;
};
static struct share share_of(int64_t rows, int mine, int team) {
    int64_t from = mine * rows / team;
    return (struct share){from, (mine + 1) * rows / team - from};
}

static void norm_share(const bf16 *x, const bf16 *weight, bf16 *out, int64_t width, float eps,
                       struct share s) {
    if (s.count)
        CONCAT(rms_norm, ROW_ISA)(x + s.from * width, weight, out + s.from * width, s.count, width,
                                  width, eps, 1);
}

void FOR_ISA(layer_begin)(const struct layer *l, const bf16 *x, int64_t rows, const bf16 *cosines,
                          const bf16 *sines, bf16 *normed, bf16 *qkv, int num_threads) {
    int64_t hidden = l->qkv.inputs, width = l->head_width, stride = l->qkv.outputs;
    struct product product = {normed, rows, hidden, &l->qkv, ROUND, qkv, 0, stride};
    struct meeting m = {0};
#pragma omp parallel num_threads(num_threads)
    {
        int mine = omp_get_thread_num(), team = omp_get_num_threads();
        struct share s = share_of(rows, mine, team);
        norm_share(x, l->attention_norm, normed, hidden, l->eps, s);
        meet(&m, team);
        multiply_share(&product, mine, team);
        meet(&m, team);
        bf16 *own = qkv + s.from * stride;
        if (s.count && l->q_norm)
            CONCAT(head_norm, ROW_ISA)(own, l->q_norm, l->k_norm, s.count, stride, l->num_heads,
                                       l->num_kv_heads, width, l->eps, 1);
        if (s.count)
            CONCAT(rotate, ROW_ISA)(own, s.count, stride, l->num_heads + l->num_kv_heads, width,
                                    cosines + s.from * width, sines + s.from * width, 1);
    }
}

void FOR_ISA(layer_end)(const struct layer *l, bf16 *x, int64_t rows, const bf16 *attended,
                        bf16 *normed, bf16 *inner, int num_threads) {
    int64_t hidden = l->output.outputs, mlp = l->down.inputs;
    struct product output = {attended, rows, l->output.inputs, &l->output, ADD, x, 0, hidden};
    struct product gated = {normed, rows, hidden, &l->gate_up, GATE, inner, 0, mlp};
    struct product down = {inner, rows, mlp, &l->down, ADD, x, 0, hidden};
    struct meeting m = {0};
#pragma omp parallel num_threads(num_threads)
    {
        int mine = omp_get_thread_num(), team = omp_get_num_threads();
        multiply_share(&output, mine, team);
        meet(&m, team);
        norm_share(x, l->mlp_norm, normed, hidden, l->eps, share_of(rows, mine, team));
        meet(&m, team);
        multiply_share(&gated, mine, team);
        meet(&m, team);
        multiply_share(&down, mine, team);
    }
}
