/* Sixteen fp32 numbers; the names are those of vector_avx2.h. */
#pragma once
#include <immintrin.h>

#include "kernels.h"

#define LANES 16
typedef __m512 vec;

static inline vec v_zero(void) { return _mm512_setzero_ps(); }
static inline vec v_set(float x) { return _mm512_set1_ps(x); }
static inline vec v_add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec v_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec v_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec v_div(vec a, vec b) { return _mm512_div_ps(a, b); }
static inline vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec v_fnma(vec a, vec b, vec c) { return _mm512_fnmadd_ps(a, b, c); }
/* NaN in `b` wins, as the instruction returns its second operand then. */
static inline vec v_max(vec a, vec b) { return _mm512_max_ps(a, b); }
static inline vec v_min(vec a, vec b) { return _mm512_min_ps(a, b); }
static inline vec v_round(vec a) { return _mm512_roundscale_ps(a, 0); }
static inline vec v_scale2(vec a, vec n) { return _mm512_scalef_ps(a, n); }

static inline __mmask16 v_mask(int64_t n) { return (__mmask16)((1u << n) - 1); }
static inline vec v_load(const float *p) { return _mm512_loadu_ps(p); }
static inline vec v_load_n(const float *p, int64_t n, float other) {
    return _mm512_mask_loadu_ps(_mm512_set1_ps(other), v_mask(n), p);
}
static inline void v_store(float *p, vec a) { _mm512_storeu_ps(p, a); }
static inline void v_store_n(float *p, vec a, int64_t n) { _mm512_mask_storeu_ps(p, v_mask(n), a); }

static inline vec v_widen(__m256i h) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
static inline vec v_load_bf16(const bf16 *p) { return v_widen(_mm256_loadu_si256((const void *)p)); }
static inline vec v_load_bf16_n(const bf16 *p, int64_t n) {
    return v_widen(_mm256_maskz_loadu_epi16(v_mask(n), p));
}

/* To the nearest bf16, ties to even, as torch does. The machine's own conversion would flush
   subnormals to zero. A NaN could round to infinity, so it becomes the quiet one. */
static inline __m512i v_bf16_bits(vec a) {
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    sum = _mm512_mask_mov_epi32(sum, nan, _mm512_set1_epi32(0x7fc00000));
    return sum;
}
static inline vec v_to_bf16(vec a) {
    return _mm512_castsi512_ps(_mm512_and_si512(v_bf16_bits(a), _mm512_set1_epi32(~0xffff)));
}
static inline __m256i v_narrow(vec a) {
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(v_bf16_bits(a), 16));
}
static inline void v_store_bf16(bf16 *p, vec a) { _mm256_storeu_si256((void *)p, v_narrow(a)); }
static inline void v_store_bf16_n(bf16 *p, vec a, int64_t n) {
    _mm256_mask_storeu_epi16(p, v_mask(n), v_narrow(a));
}

/* Pairwise, in an order of its own for each width of vector. */
static inline float v_sum(vec a) { return _mm512_reduce_add_ps(a); }
static inline float v_largest(vec a) { return _mm512_reduce_max_ps(a); }

/* The bf16 numbers in the lower and in the upper halves. */
static inline vec v_low_bf16(vec a) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 16));
}
static inline vec v_high_bf16(vec a) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(~0xffff)));
}
