/* silu(gate) * up of rows that hold both, one after the other. */
#pragma once

void FOR_ISA(silu_mul)(const bf16 *both, bf16 *out, int64_t rows, int64_t width, int64_t stride,
                       int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (rows * width > 8192)
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *gate = both + row * stride, *up = gate + width;
        for (int64_t i = 0; i < width; i += LANES) {
            int64_t n = width - i < LANES ? width - i : LANES;
            vec opened = v_to_bf16(v_silu(v_load_bf16_n(gate + i, n)));
            v_store_bf16_n(out + row * width + i, v_mul(opened, v_load_bf16_n(up + i, n)), n);
        }
    }
}
