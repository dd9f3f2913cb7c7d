/* Products of bf16 pairs in fp32, for CPUs without an instruction for it. A bf16 number is the upper
   half of the fp32 number of the same value. */
#pragma once

typedef struct {
    vec even, odd;
} weights;
typedef weights inputs;

static inline weights load_weights(const bf16 *p) {
    vec both = v_load((const float *)(const void *)p);
    return (weights){v_low_bf16(both), v_high_bf16(both)};
}
static inline inputs load_inputs(const bf16 *p) {
    uint32_t even = (uint32_t)p[0] << 16, odd = (uint32_t)p[1] << 16;
    float first, second;
    __builtin_memcpy(&first, &even, sizeof first);
    __builtin_memcpy(&second, &odd, sizeof second);
    return (inputs){v_set(first), v_set(second)};
}
static inline vec add_products(vec sum, weights w, inputs x) {
    return v_fma(w.odd, x.odd, v_fma(w.even, x.even, sum));
}
