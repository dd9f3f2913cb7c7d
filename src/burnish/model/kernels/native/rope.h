/* Rotary embedding in the half-split layout; rounds where `rotate` in decoder.py does. */
#pragma once

static void rotate_part(bf16 *x, const bf16 *cosines, const bf16 *sines, int64_t half, int64_t n) {
    vec first = v_load_bf16_n(x, n), second = v_load_bf16_n(x + half, n);
    vec cos1 = v_load_bf16_n(cosines, n), cos2 = v_load_bf16_n(cosines + half, n);
    vec sin1 = v_load_bf16_n(sines, n), sin2 = v_load_bf16_n(sines + half, n);
    vec turned1 = v_to_bf16(v_mul(v_sub(v_zero(), second), sin1));
    vec turned2 = v_to_bf16(v_mul(first, sin2));
    v_store_bf16_n(x, v_add(v_to_bf16(v_mul(first, cos1)), turned1), n);
    v_store_bf16_n(x + half, v_add(v_to_bf16(v_mul(second, cos2)), turned2), n);
}

/* The first `heads` heads of each row, in place. */
void FOR_ISA(rotate)(bf16 *x, int64_t rows, int64_t stride, int64_t heads, int64_t width,
                     const bf16 *cosines, const bf16 *sines, int num_threads) {
    int64_t half = width / 2;
#pragma omp parallel for num_threads(num_threads) if (rows * heads * width > 16384)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++)
            for (int64_t i = 0; i < half; i += LANES)
                rotate_part(x + row * stride + head * width + i, cosines + row * width + i,
                            sines + row * width + i, half, half - i < LANES ? half - i : LANES);
}
