/* A decoder's layer around its attention, as two calls: a step makes 60 of them instead of 400. */
#pragma once

void FOR_ISA(layer_begin)(const struct layer *l, const bf16 *x, int64_t rows, const bf16 *cosines,
                          const bf16 *sines, bf16 *normed, bf16 *qkv, int num_threads) {
    int64_t hidden = l->qkv.inputs, width = l->head_width, stride = l->qkv.outputs;
    CONCAT(rms_norm, ROW_ISA)(x, l->attention_norm, normed, rows, hidden, hidden, l->eps,
                              num_threads);
    FOR_ISA(linear)(normed, rows, hidden, &l->qkv, qkv, stride, 0, num_threads);
    if (l->q_norm)
        CONCAT(head_norm, ROW_ISA)(qkv, l->q_norm, l->k_norm, rows, stride, l->num_heads,
                                   l->num_kv_heads, width, l->eps, num_threads);
    CONCAT(rotate, ROW_ISA)(qkv, rows, stride, l->num_heads + l->num_kv_heads, width, cosines,
                            sines, num_threads);
}

void FOR_ISA(layer_end)(const struct layer *l, bf16 *x, int64_t rows, const bf16 *attended,
                        bf16 *normed, bf16 *inner, int num_threads) {
    int64_t hidden = l->output.outputs, mlp = l->down.inputs;
    FOR_ISA(linear)(attended, rows, l->output.inputs, &l->output, x, hidden, 1, num_threads);
    CONCAT(rms_norm, ROW_ISA)(x, l->mlp_norm, normed, rows, hidden, hidden, l->eps, num_threads);
    FOR_ISA(gated_linear)(normed, rows, hidden, &l->gate_up, inner, mlp, num_threads);
    FOR_ISA(linear)(inner, rows, mlp, &l->down, x, hidden, 1, num_threads);
}
