/* Eight fp32 numbers; the names are those of vector_avx512.h. */
#pragma once
#include <immintrin.h>
#include <string.h>

#include "kernels.h"

#define LANES 8
typedef __m256 vec;

static inline vec v_zero(void) { return _mm256_setzero_ps(); }
static inline vec v_set(float x) { return _mm256_set1_ps(x); }
static inline vec v_add(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline vec v_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
static inline vec v_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec v_div(vec a, vec b) { return _mm256_div_ps(a, b); }
static inline vec v_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec v_fnma(vec a, vec b, vec c) { return _mm256_fnmadd_ps(a, b, c); }
/* NaN in `b` wins, as the instruction returns its second operand then. */
static inline vec v_max(vec a, vec b) { return _mm256_max_ps(a, b); }
static inline vec v_min(vec a, vec b) { return _mm256_min_ps(a, b); }
static inline vec v_round(vec a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
/* a * 2 ** n in two steps, so that n = 128 or n = -140 does not leave the range of exponents. */
static inline vec v_scale2(vec a, vec n) {
    __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
    __m256i bias = _mm256_set1_epi32(127);
    __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    __m256i second = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
    return v_mul(v_mul(a, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second));
}

static inline vec v_load(const float *p) { return _mm256_loadu_ps(p); }
static inline vec v_load_n(const float *p, int64_t n, float other) {
    float all[LANES];
    for (int i = 0; i < LANES; i++) all[i] = i < n ? p[i] : other;
    return v_load(all);
}
static inline void v_store(float *p, vec a) { _mm256_storeu_ps(p, a); }
static inline void v_store_n(float *p, vec a, int64_t n) {
    float all[LANES];
    v_store(all, a);
    memcpy(p, all, sizeof(float) * (size_t)n);
}

static inline vec v_load_bf16(const bf16 *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static inline vec v_load_bf16_n(const bf16 *p, int64_t n) {
    bf16 all[LANES] = {0};
    memcpy(all, p, sizeof(bf16) * (size_t)n);
    return v_load_bf16(all);
}

/* To the nearest bf16, ties to even, as torch does; a NaN becomes the quiet one. */
static inline __m256i v_bf16_bits(vec a) {
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(sum, _mm256_set1_epi32(0x7fc00000), nan);
}
static inline vec v_to_bf16(vec a) {
    return _mm256_castsi256_ps(_mm256_and_si256(v_bf16_bits(a), _mm256_set1_epi32(~0xffff)));
}
static inline __m128i v_narrow(vec a) {
    __m256i high = _mm256_srli_epi32(v_bf16_bits(a), 16);
    __m256i packed = _mm256_packus_epi32(high, high);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0xd8));
}
static inline void v_store_bf16(bf16 *p, vec a) { _mm_storeu_si128((void *)p, v_narrow(a)); }
static inline void v_store_bf16_n(bf16 *p, vec a, int64_t n) {
    bf16 all[LANES];
    v_store_bf16(all, a);
    memcpy(p, all, sizeof(bf16) * (size_t)n);
}

static inline float v_sum(vec a) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
static inline float v_largest(vec a) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

/* The bf16 numbers in the lower and in the upper halves. */
static inline vec v_low_bf16(vec a) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 16));
}
static inline vec v_high_bf16(vec a) {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(~0xffff)));
}
