/* Root-mean-square norm; rounds where `RMSNorm` in decoder.py does. */
#pragma once
#include <math.h>

static void norm_row(const bf16 *x, const bf16 *weight, bf16 *out, int64_t width, float eps) {
    int64_t whole = width - width % LANES, rest = width - whole;
    vec sum = v_zero();
    for (int64_t i = 0; i < whole; i += LANES) {
        vec v = v_load_bf16(x + i);
        sum = v_fma(v, v, sum);
    }
    if (rest) {
        vec v = v_load_bf16_n(x + whole, rest);
        sum = v_fma(v, v, sum);
    }
    vec scale = v_set(1.0f / sqrtf(v_sum(sum) / (float)width + eps));
    for (int64_t i = 0; i < whole; i += LANES) {
        vec v = v_to_bf16(v_mul(v_load_bf16(x + i), scale));
        v_store_bf16(out + i, v_mul(v, v_load_bf16(weight + i)));
    }
    if (rest) {
        vec v = v_to_bf16(v_mul(v_load_bf16_n(x + whole, rest), scale));
        v_store_bf16_n(out + whole, v_mul(v, v_load_bf16_n(weight + whole, rest)), rest);
    }
}

void FOR_ISA(rms_norm)(const bf16 *x, const bf16 *weight, bf16 *out, int64_t rows, int64_t width,
                       int64_t stride, float eps, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (rows * width > 16384)
    for (int64_t i = 0; i < rows; i++)
        norm_row(x + i * stride, weight, out + i * width, width, eps);
}

/* The heads of queries and of keys, each with the weight of its kind, in place. */
void FOR_ISA(head_norm)(bf16 *qkv, const bf16 *q_weight, const bf16 *k_weight, int64_t rows,
                        int64_t stride, int64_t num_heads, int64_t num_kv_heads, int64_t width,
                        float eps, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (rows * stride > 16384)
    for (int64_t i = 0; i < rows; i++)
        for (int64_t head = 0; head < num_heads + num_kv_heads; head++) {
            bf16 *x = qkv + i * stride + head * width;
            norm_row(x, head < num_heads ? q_weight : k_weight, x, width, eps);
        }
}
