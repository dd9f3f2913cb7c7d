/* Products of a few rows with a block of keys or values, kept in registers.

   Each lane is one chain of multiply-adds over its own row's numbers in order. The number of rows
   and vectors that are computed together changes nothing about a chain. */
#pragma once
#include <string.h>

#include "attention.h"

#define INLINE static inline __attribute__((always_inline))

enum { UNIT_VECS = UNIT_KEYS / LANES, TILE_VECS = 4, LINE_BYTES = 64 };

/* One vector of words, ready to be multiplied by a broadcast word. */
#ifdef __AVX512BF16__
enum { TILE_ROWS = 6 };
typedef struct {
    __m512i both;
} operand;
INLINE operand operand_of(const char *words, int wide) {
    (void)wide;
    return (operand){_mm512_loadu_si512(words)};
}
INLINE vec dot(const uint32_t *word, operand b, vec sum, int wide) {
    if (wide) return v_fma(_mm512_castsi512_ps(_mm512_set1_epi32((int)*word)),
                           _mm512_castsi512_ps(b.both), sum);
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32((int)*word), (__m512bh)b.both);
}
INLINE void store_weights(bf16 *to, vec x) {
    _mm256_storeu_si256((void *)to, (__m256i)_mm512_cvtneps_pbh(x));
}
#else
typedef struct {
    vec low, high;
} operand;
#if LANES == 16
enum { TILE_ROWS = 4 };
INLINE operand operand_of(const char *words, int wide) {
    __m512i x = _mm512_loadu_si512(words);
    if (wide) return (operand){_mm512_castsi512_ps(x), v_zero()};
    return (operand){_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                     _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(~0xffff)))};
}
#else
enum { TILE_ROWS = 2 };
INLINE operand operand_of(const char *words, int wide) {
    __m256i x = _mm256_loadu_si256((const void *)words);
    if (wide) return (operand){_mm256_castsi256_ps(x), v_zero()};
    return (operand){_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
                     _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(~0xffff)))};
}
#endif
INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
INLINE vec dot(const uint32_t *word, operand b, vec sum, int wide) {
    if (wide) return v_fma(v_set(float_of(*word)), b.low, sum);
    sum = v_fma(v_set(float_of(*word & ~0xffffu)), b.high, sum);
    return v_fma(v_set(float_of(*word << 16)), b.low, sum);
}
INLINE void store_weights(bf16 *to, vec x) { v_store_bf16(to, x); }
#endif

/* scores[row][lane] = row . key for `vecs` vectors of keys; keys[i] are LANES keys, a step apart.
   `ahead` says how far behind each of them its counterpart in the next block lies. */
INLINE void score_tile(int rows, int vecs, int64_t steps, const uint32_t *queries,
                       int64_t query_stride, const char *const *keys, const int64_t *ahead,
                       float *scores, int wide) {
    vec sum[TILE_ROWS][TILE_VECS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++) sum[r][v] = v_zero();
    for (int64_t s = 0; s < steps; s++) {
        operand b[TILE_VECS];
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++) {
            const char *at = keys[v] + s * LINE_BYTES;
            b[v] = operand_of(at, wide);
            __builtin_prefetch(at + ahead[v]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < vecs; v++)
                sum[r][v] = dot(queries + r * query_stride + s, b[v], sum[r][v], wide);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++) v_store(scores + r * BLOCK_KEYS + v * LANES, sum[r][v]);
}

/* acc[row] = fade[row] * acc[row] + weights[row] . values for `vecs` vectors of columns.
   values[u] is a unit of keys; a step of it is `step_bytes` long. */
INLINE void mix_tile(int rows, int vecs, int64_t steps, const uint32_t *weights,
                     const char *const *values, const int64_t *ahead, int64_t step_bytes,
                     const float *fade, float *acc, int64_t acc_stride, int wide) {
    const int64_t unit_steps = wide ? UNIT_KEYS : UNIT_KEYS / 2;
    vec sum[TILE_ROWS][TILE_VECS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++)
            sum[r][v] = v_mul(v_set(fade[r]), v_load(acc + r * acc_stride + v * LANES));
    for (; steps > 0; steps -= unit_steps, values++, ahead++, weights += unit_steps) {
        int64_t here = steps < unit_steps ? steps : unit_steps;
        const char *unit = *values, *next = unit + *ahead;
        for (int64_t s = 0; s < here; s++) {
            operand b[TILE_VECS];
#pragma GCC unroll 8
            for (int v = 0; v < vecs; v++) {
                int64_t at = s * step_bytes + v * LANES * 4;
                b[v] = operand_of(unit + at, wide);
                __builtin_prefetch(next + at);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                for (int v = 0; v < vecs; v++)
                    sum[r][v] = dot(weights + r * BLOCK_KEYS + s, b[v], sum[r][v], wide);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++) v_store(acc + r * acc_stride + v * LANES, sum[r][v]);
}

/* Constants for every number of rows and vectors: only then do the sums stay in registers. */
#define ROW_CASES(call, vecs)                                                                      \
    switch (rows) {                                                                                \
    case 1: call(1, vecs); break;                                                                  \
    case 2: call(2, vecs); break;                                                                  \
    EXTRA_ROW_CASES(call, vecs)                                                                    \
    }
#ifdef __AVX512BF16__
#define EXTRA_ROW_CASES(call, vecs)                                                                \
    case 3: call(3, vecs); break;                                                                  \
    case 4: call(4, vecs); break;                                                                  \
    case 5: call(5, vecs); break;                                                                  \
    case 6: call(6, vecs); break;
#elif LANES == 16
#define EXTRA_ROW_CASES(call, vecs)                                                                \
    case 3: call(3, vecs); break;                                                                  \
    case 4: call(4, vecs); break;
#else
#define EXTRA_ROW_CASES(call, vecs)
#endif
#define ALL_CASES(call)                                                                            \
    switch (vecs) {                                                                                \
    case 1: ROW_CASES(call, 1) break;                                                              \
    case 2: ROW_CASES(call, 2) break;                                                              \
    case 3: ROW_CASES(call, 3) break;                                                              \
    case 4: ROW_CASES(call, 4) break;                                                              \
    }

INLINE void score_rows(int rows, int vecs, int64_t steps, const uint32_t *queries, int64_t stride,
                       const char *const *keys, const int64_t *ahead, float *scores, int wide) {
#define CALL(r, v) score_tile(r, v, steps, queries, stride, keys, ahead, scores, wide)
    ALL_CASES(CALL)
#undef CALL
}

INLINE void mix_rows(int rows, int vecs, int64_t steps, const uint32_t *weights,
                     const char *const *values, const int64_t *ahead, int64_t step_bytes,
                     const float *fade, float *acc, int64_t acc_stride, int wide) {
#define CALL(r, v)                                                                                 \
    mix_tile(r, v, steps, weights, values, ahead, step_bytes, fade, acc, acc_stride, wide)
    ALL_CASES(CALL)
#undef CALL
}
