/* Products of a few rows with a block of keys or values, kept in registers.

   Each lane is one chain of multiply-adds over its own row's numbers in order. The number of rows
   and vectors that are computed together changes nothing about a chain. */
#pragma once
#include <string.h>

#include "attention.h"

#define INLINE static inline __attribute__((always_inline))

enum { UNIT_VECS = UNIT_KEYS / LANES, TILE_VECS = 4, LINE_BYTES = 64 };

/* What products are made of. */
enum products { PRODUCTS_PAIRS, PRODUCTS_F32, PRODUCTS_BYTES, PRODUCTS_TILES };

/* Whether this is compiled for a CPU with tiles; then tiles.h is there. */
#ifndef HAS_TILES
#define HAS_TILES 0
#endif

/* Products with words of bf16 pairs go by PASSES over the numbers of a word. Without an instruction for
   pairs they are two, the odd numbers' first, and rows hold fp32 numbers. */
#ifdef __AVX512BF16__
enum { TILE_ROWS = 6, WIDE_ROWS = 0 };
/* One vector of words, ready to be multiplied by a broadcast word. */
typedef __m512i operand;
INLINE operand operand_of(const char *words, int wide, int pass) {
    (void)wide, (void)pass;
    return _mm512_loadu_si512(words);
}
/* `row[s]` times an operand; in the second pass the other number of the same word. */
INLINE vec dot(const uint32_t *row, int64_t s, operand b, vec sum, int wide, int pass) {
    (void)pass;
    __m512i word = _mm512_set1_epi32((int)row[s]);
    if (wide) return v_fma(_mm512_castsi512_ps(word), _mm512_castsi512_ps(b), sum);
    return _mm512_dpbf16_ps(sum, (__m512bh)word, (__m512bh)b);
}
INLINE void store_pairs(bf16 *to, vec x) {
    _mm256_storeu_si256((void *)to, (__m256i)_mm512_cvtneps_pbh(x));
}
#else
enum { TILE_ROWS = LANES == 16 ? 6 : 2, WIDE_ROWS = 1 };
typedef vec operand;
INLINE operand operand_of(const char *words, int wide, int pass) {
    vec both = v_load((const float *)(const void *)words);
    return wide ? both : pass ? v_low_bf16(both) : v_high_bf16(both);
}
INLINE vec dot(const uint32_t *row, int64_t s, operand b, vec sum, int wide, int pass) {
    return v_fma(v_set(((const float *)row)[wide ? s : 2 * s + 1 - pass]), b, sum);
}
INLINE void store_pairs(bf16 *to, vec x) { v_store_bf16(to, x); }
#endif
INLINE int passes_of(int wide) { return WIDE_ROWS && !wide ? 2 : 1; }
INLINE int widens_rows(enum products products) { return WIDE_ROWS && products == PRODUCTS_PAIRS; }

/* Into the second-level cache: the first would have to give up what is being read. Measured on
   Zen 4, pages of 4 KiB in random order: 14 GB/s, to the first level 11, without 9. */
INLINE void fetch(const char *at) { __builtin_prefetch(at, 0, 2); }

/* Whole numbers of a vector's lanes. */
#if LANES == 16
typedef __m512i vint;
INLINE vint i_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE void i_store(void *p, vint x) { _mm512_storeu_si512(p, x); }
INLINE vint i_set(uint32_t x) { return _mm512_set1_epi32((int)x); }
INLINE vint i_and(vint a, vint b) { return _mm512_and_si512(a, b); }
INLINE vint i_or(vint a, vint b) { return _mm512_or_si512(a, b); }
INLINE vint i_xor(vint a, vint b) { return _mm512_xor_si512(a, b); }
INLINE vint i_left(vint a, int n) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(n)); }
INLINE vint i_right(vint a, int n) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(n)); }
INLINE vint i_right_signed(vint a, int n) { return _mm512_sra_epi32(a, _mm_cvtsi32_si128(n)); }
INLINE vec i_to_vec(vint a) { return _mm512_cvtepi32_ps(a); }
INLINE vec i_as_vec(vint a) { return _mm512_castsi512_ps(a); }
INLINE vint v_as_int(vec a) { return _mm512_castps_si512(a); }
INLINE vint i_add(vint a, vint b) { return _mm512_add_epi32(a, b); }
INLINE vint i_sub(vint a, vint b) { return _mm512_sub_epi32(a, b); }
INLINE vint i_rounded(vec a) { return _mm512_cvtps_epi32(a); }
INLINE int32_t i_sum(vint a) { return _mm512_reduce_add_epi32(a); }
INLINE vint i_odd_bytes(vint a) { return _mm512_srli_epi16(a, 8); }
INLINE vint i_dot_halves(vint a, vint b) { return _mm512_madd_epi16(a, b); }
/* Sixteen bits of each, by fours: those of 0 and 2, then those of 1 and 3. */
INLINE void i_store_even_odd(int16_t *to, vint a) {
    _mm256_storeu_si256((void *)to, _mm256_shuffle_epi8(_mm512_cvtsepi32_epi16(a), _mm256_setr_epi8(
        0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,
        0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15)));
}
#else
typedef __m256i vint;
INLINE vint i_load(const void *p) { return _mm256_loadu_si256(p); }
INLINE void i_store(void *p, vint x) { _mm256_storeu_si256(p, x); }
INLINE vint i_set(uint32_t x) { return _mm256_set1_epi32((int)x); }
INLINE vint i_and(vint a, vint b) { return _mm256_and_si256(a, b); }
INLINE vint i_or(vint a, vint b) { return _mm256_or_si256(a, b); }
INLINE vint i_xor(vint a, vint b) { return _mm256_xor_si256(a, b); }
INLINE vint i_left(vint a, int n) { return _mm256_sll_epi32(a, _mm_cvtsi32_si128(n)); }
INLINE vint i_right(vint a, int n) { return _mm256_srl_epi32(a, _mm_cvtsi32_si128(n)); }
INLINE vint i_right_signed(vint a, int n) { return _mm256_sra_epi32(a, _mm_cvtsi32_si128(n)); }
INLINE vec i_to_vec(vint a) { return _mm256_cvtepi32_ps(a); }
INLINE vec i_as_vec(vint a) { return _mm256_castsi256_ps(a); }
INLINE vint v_as_int(vec a) { return _mm256_castps_si256(a); }
INLINE vint i_add(vint a, vint b) { return _mm256_add_epi32(a, b); }
INLINE vint i_sub(vint a, vint b) { return _mm256_sub_epi32(a, b); }
INLINE vint i_rounded(vec a) { return _mm256_cvtps_epi32(a); }
INLINE int32_t i_sum(vint a) {
    int32_t all[LANES], sum = 0;
    i_store(all, a);
    for (int i = 0; i < LANES; i++) sum += all[i];
    return sum;
}
INLINE vint i_odd_bytes(vint a) { return _mm256_srli_epi16(a, 8); }
INLINE vint i_dot_halves(vint a, vint b) { return _mm256_madd_epi16(a, b); }
INLINE void i_store_even_odd(int16_t *to, vint a) {
    __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storeu_si128((void *)to, _mm_shuffle_epi8(halves, _mm_setr_epi8(
        0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15)));
}
#endif

/* scores[row][lane] = row . key for `vecs` vectors of keys; keys[i] are LANES keys, a step apart.
   Meanwhile the units at `next` are fetched, a quarter of the steps for each. */
INLINE void score_tile(int rows, int vecs, int64_t steps, const uint32_t *queries,
                       int64_t query_stride, const char *const *keys, const char *const *next,
                       float *scores, int wide) {
    vec sum[TILE_ROWS][TILE_VECS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++) sum[r][v] = v_zero();
    for (int64_t s = 0, quarter = 0; quarter < BLOCK_UNITS; quarter++) {
        const char *line = next[quarter];
        for (int64_t end = (quarter + 1) * steps / BLOCK_UNITS; s < end; s++) {
#pragma GCC unroll 2
            for (int pass = 0; pass < passes_of(wide); pass++) {
                operand b[TILE_VECS];
#pragma GCC unroll 8
                for (int v = 0; v < vecs; v++)
                    b[v] = operand_of(keys[v] + s * LINE_BYTES, wide, pass);
#pragma GCC unroll 8
                for (int i = 0; i < BLOCK_UNITS && !pass; i++, line += LINE_BYTES) fetch(line);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                    for (int v = 0; v < vecs; v++)
                        sum[r][v] =
                            dot(queries + r * query_stride, s, b[v], sum[r][v], wide, pass);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++) v_store(scores + r * BLOCK_KEYS + v * LANES, sum[r][v]);
}

/* acc[row] = fade[row] * acc[row] + weights[row] . values for `vecs` vectors of columns.
   values[u] is a unit of keys; a step of it is `step_bytes` long. Meanwhile the units at `next` are
   fetched. */
INLINE void mix_tile(int rows, int vecs, int64_t steps, const uint32_t *weights,
                     const char *const *values, const char *const *next, int64_t step_bytes,
                     const float *fade, float *acc, int64_t acc_stride, int wide) {
    const int64_t unit_steps = wide ? UNIT_KEYS : UNIT_KEYS / 2;
    const int64_t unit_words = wide || WIDE_ROWS ? UNIT_KEYS : UNIT_KEYS / 2;
    vec sum[TILE_ROWS][TILE_VECS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++)
            sum[r][v] = v_mul(v_set(fade[r]), v_load(acc + r * acc_stride + v * LANES));
    for (; steps > 0; steps -= unit_steps, values++, next++, weights += unit_words) {
        int64_t here = steps < unit_steps ? steps : unit_steps;
        const char *unit = *values, *line = *next;
        for (int64_t s = 0; s < here; s++) {
#pragma GCC unroll 2
            for (int pass = 0; pass < passes_of(wide); pass++) {
                operand b[TILE_VECS];
#pragma GCC unroll 8
                for (int v = 0; v < vecs; v++) {
                    int64_t at = s * step_bytes + v * LANES * 4;
                    b[v] = operand_of(unit + at, wide, pass);
                    if (!pass) fetch(line + at);
                }
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                    for (int v = 0; v < vecs; v++)
                        sum[r][v] = dot(weights + r * BLOCK_KEYS, s, b[v], sum[r][v], wide, pass);
            }
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
#if LANES == 16
#define EXTRA_ROW_CASES(call, vecs)                                                                \
    case 3: call(3, vecs); break;                                                                  \
    case 4: call(4, vecs); break;                                                                  \
    case 5: call(5, vecs); break;                                                                  \
    case 6: call(6, vecs); break;
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
                       const char *const *keys, const char *const *next, float *scores, int wide) {
#define CALL(r, v) score_tile(r, v, steps, queries, stride, keys, next, scores, wide)
    ALL_CASES(CALL)
#undef CALL
}

INLINE void mix_rows(int rows, int vecs, int64_t steps, const uint32_t *weights,
                     const char *const *values, const char *const *next, int64_t step_bytes,
                     const float *fade, float *acc, int64_t acc_stride, int wide) {
#define CALL(r, v)                                                                                 \
    mix_tile(r, v, steps, weights, values, next, step_bytes, fade, acc, acc_stride, wide)
    ALL_CASES(CALL)
#undef CALL
}
