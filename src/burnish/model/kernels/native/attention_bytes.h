/* Products of int8 pages in whole numbers: four to a word, exact in any order.

   Queries and weights are split into two planes of signed bytes, x = (128 * high + low) * step with
   |x / step| <= 16256: finer than bf16 by 6 bits, so all that is lost is what the pages lost. Stored
   numbers are shifted by 128, as the instruction wants them unsigned; `bias` takes that back. */
#pragma once
#include "attention_tile.h"

enum { BYTE_ROWS = 3, BYTE_WORDS = BLOCK_KEYS / 4 };
static const float BYTE_TOP = 16256.0f;

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#define HAS_BYTE_PRODUCTS 1

INLINE void split_planes(__m512i whole, int8_t *high, int8_t *low) {
    __m512i top = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(64)), 7);
    __m512i rest = _mm512_sub_epi32(whole, _mm512_slli_epi32(top, 7));
    _mm_storeu_si128((void *)high, _mm512_cvtepi32_epi8(top));
    _mm_storeu_si128((void *)low, _mm512_cvtepi32_epi8(rest));
}

/* Sixteen sums of both planes as fp32, without the shift. */
INLINE vec joined(__m512i high, __m512i low, int32_t bias) {
    __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 7), low);
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32(bias)));
}

/* As score_tile; a row of queries is `steps` words of the high plane, then of the low. */
INLINE void score_bytes_tile(int rows, int vecs, int64_t steps, const uint32_t *queries,
                             int64_t stride, const int32_t *bias, const char *const *keys,
                             const char *const *next, float *scores) {
    __m512i high[BYTE_ROWS][TILE_VECS], low[BYTE_ROWS][TILE_VECS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++) high[r][v] = low[r][v] = _mm512_setzero_si512();
    for (int64_t s = 0, quarter = 0; quarter < BLOCK_UNITS; quarter++) {
        const char *line = next[quarter];
        for (int64_t end = (quarter + 1) * steps / BLOCK_UNITS; s < end; s++) {
            __m512i b[TILE_VECS];
#pragma GCC unroll 8
            for (int v = 0; v < vecs; v++) b[v] = _mm512_loadu_si512(keys[v] + s * LINE_BYTES);
#pragma GCC unroll 8
            for (int i = 0; i < BLOCK_UNITS; i++, line += LINE_BYTES) fetch(line);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const uint32_t *word = queries + r * stride + s;
                __m512i a = _mm512_set1_epi32((int)word[0]);
                __m512i c = _mm512_set1_epi32((int)word[steps]);
#pragma GCC unroll 8
                for (int v = 0; v < vecs; v++) {
                    high[r][v] = _mm512_dpbusd_epi32(high[r][v], b[v], a);
                    low[r][v] = _mm512_dpbusd_epi32(low[r][v], b[v], c);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++)
            v_store(scores + r * BLOCK_KEYS + v * LANES, joined(high[r][v], low[r][v], bias[r]));
}

/* As mix_tile; a row of weights is BYTE_WORDS words of the high plane, then of the low. */
INLINE void mix_bytes_tile(int rows, int vecs, int64_t steps, const uint32_t *weights,
                           const int32_t *bias, const float *step, const char *const *values,
                           const char *const *next, int64_t step_bytes, const float *fade,
                           float *acc, int64_t acc_stride) {
    const int64_t unit_steps = UNIT_KEYS / 4;
    __m512i high[BYTE_ROWS][TILE_VECS], low[BYTE_ROWS][TILE_VECS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++) high[r][v] = low[r][v] = _mm512_setzero_si512();
    for (int64_t s = 0; s < steps; s++) {
        int64_t at = s % unit_steps * step_bytes;
        const char *unit = values[s / unit_steps] + at, *line = next[s / unit_steps] + at;
        __m512i b[TILE_VECS];
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++) {
            b[v] = _mm512_loadu_si512(unit + v * LINE_BYTES);
            fetch(line + v * LINE_BYTES);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const uint32_t *word = weights + r * BLOCK_KEYS + s;
            __m512i a = _mm512_set1_epi32((int)word[0]);
            __m512i c = _mm512_set1_epi32((int)word[BYTE_WORDS]);
#pragma GCC unroll 8
            for (int v = 0; v < vecs; v++) {
                high[r][v] = _mm512_dpbusd_epi32(high[r][v], b[v], a);
                low[r][v] = _mm512_dpbusd_epi32(low[r][v], b[v], c);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++) {
            float *to = acc + r * acc_stride + v * LANES;
            vec before = v_mul(v_set(fade[r]), v_load(to));
            v_store(to, v_fma(joined(high[r][v], low[r][v], bias[r]), v_set(step[r]), before));
        }
}

#define BYTE_CASES(call, vecs)                                                                     \
    switch (rows) {                                                                                \
    case 1: call(1, vecs); break;                                                                  \
    case 2: call(2, vecs); break;                                                                  \
    case 3: call(3, vecs); break;                                                                  \
    }
#define ALL_BYTE_CASES(call)                                                                       \
    switch (vecs) {                                                                                \
    case 1: BYTE_CASES(call, 1) break;                                                             \
    case 2: BYTE_CASES(call, 2) break;                                                             \
    case 3: BYTE_CASES(call, 3) break;                                                             \
    case 4: BYTE_CASES(call, 4) break;                                                             \
    }

INLINE void score_bytes(int rows, int vecs, int64_t steps, const uint32_t *queries, int64_t stride,
                        const int32_t *bias, const char *const *keys, const char *const *next,
                        float *scores) {
#define CALL(r, v) score_bytes_tile(r, v, steps, queries, stride, bias, keys, next, scores)
    ALL_BYTE_CASES(CALL)
#undef CALL
}

INLINE void mix_bytes(int rows, int vecs, int64_t steps, const uint32_t *weights,
                      const int32_t *bias, const float *step, const char *const *values,
                      const char *const *next, int64_t step_bytes, const float *fade, float *acc,
                      int64_t acc_stride) {
#define CALL(r, v)                                                                                 \
    mix_bytes_tile(r, v, steps, weights, bias, step, values, next, step_bytes, fade, acc,          \
                   acc_stride)
    ALL_BYTE_CASES(CALL)
#undef CALL
}

/* A row of queries as two planes; returns its step, and 128 times its sum in `bias`. */
INLINE float split_query(const float *row, int64_t width, uint32_t *planes, int32_t *bias) {
    vec most = v_zero(), trace = v_zero();
    for (int64_t i = 0; i < width; i += LANES) {
        vec x = v_load(row + i);
        most = v_max(most, v_max(x, v_sub(v_zero(), x)));
        trace = v_add(trace, v_mul(x, v_zero()));
    }
    float top = v_largest(most);
    vec up = v_set(top > 0.0f ? BYTE_TOP / top : 0.0f);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < width; i += LANES) {
        __m512i whole = _mm512_cvtps_epi32(v_mul(v_load(row + i), up));
        sum = _mm512_add_epi32(sum, whole);
        split_planes(whole, (int8_t *)planes + i, (int8_t *)planes + width + i);
    }
    *bias = 128 * _mm512_reduce_add_epi32(sum);
    /* Zero, or NaN if a number was not finite: that must be seen. */
    return top / BYTE_TOP + v_sum(trace);
}

/* Weights of one row over `units` units, not negative, as two planes. */
INLINE float split_weights(const float *row, int units, uint32_t *planes, int32_t *bias) {
    vec most = v_zero(), trace = v_zero();
    for (int i = 0; i < units * UNIT_KEYS; i += LANES) {
        vec x = v_load(row + i);
        most = v_max(most, x);
        trace = v_add(trace, v_mul(x, v_zero()));
    }
    float top = v_largest(most);
    vec up = v_set(top > 0.0f ? BYTE_TOP / top : 0.0f);
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < units * UNIT_KEYS; i += LANES) {
        __m512i whole = _mm512_cvtps_epi32(v_mul(v_load(row + i), up));
        sum = _mm512_add_epi32(sum, whole);
        split_planes(whole, (int8_t *)planes + i, (int8_t *)planes + 4 * BYTE_WORDS + i);
    }
    *bias = 128 * _mm512_reduce_add_epi32(sum);
    return top / BYTE_TOP + v_sum(trace);
}
#else
#define HAS_BYTE_PRODUCTS 0
#endif
