/* Products of int8 pages in whole numbers: four to a word, exact in any order.

   Queries and weights are whole numbers of at most 16256 steps: finer than bf16 by 6 bits, so all that
   is lost is what the pages lost. Stored numbers are shifted by 128, so as not to be negative; `bias`
   takes that back. Both ways to multiply give the same sums: an instruction for four bytes takes rows
   as two planes of signed bytes, x = 128 * high + low; the one for two halves of a word takes x itself,
   first with the even bytes of a word, then with the odd ones. */
#pragma once
#include "attention_tile.h"

enum { BYTE_WORDS = BLOCK_KEYS / 4 };
static const float BYTE_TOP = 16256.0f;

/* Products go by two passes over a word, each with a word of its own of the row. */
#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
enum { BYTE_ROWS = 3, BYTE_SUMS = 2 };
INLINE vint byte_operand(const char *at, int pass) {
    (void)pass;
    return i_load(at);
}
INLINE vint add_bytes(vint sum, vint b, vint word) { return _mm512_dpbusd_epi32(sum, b, word); }
INLINE uint32_t byte_word(const uint32_t *row, int64_t s, int64_t steps, int pass) {
    return row[pass ? s + steps : s];
}
/* LANES of `total` whole numbers of a row, from `at` on. */
INLINE void put_whole(vint whole, uint32_t *row, int64_t at, int64_t total) {
    __m512i top = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(64)), 7);
    __m512i rest = _mm512_sub_epi32(whole, _mm512_slli_epi32(top, 7));
    _mm_storeu_si128((void *)((int8_t *)row + at), _mm512_cvtepi32_epi8(top));
    _mm_storeu_si128((void *)((int8_t *)row + total + at), _mm512_cvtepi32_epi8(rest));
}
INLINE vint whole_sum(const vint *sums) { return i_add(i_left(sums[0], 7), sums[1]); }
#else
enum { BYTE_ROWS = LANES == 16 ? 3 : 2, BYTE_SUMS = 1 };
INLINE vint byte_operand(const char *at, int pass) {
    return pass ? i_odd_bytes(i_load(at)) : i_and(i_load(at), i_set(0x00ff00ff));
}
INLINE vint add_bytes(vint sum, vint b, vint word) { return i_add(sum, i_dot_halves(b, word)); }
INLINE uint32_t byte_word(const uint32_t *row, int64_t s, int64_t steps, int pass) {
    (void)steps;
    return row[2 * s + pass];
}
INLINE void put_whole(vint whole, uint32_t *row, int64_t at, int64_t total) {
    (void)total;
    i_store_even_odd((int16_t *)row + at, whole);
}
INLINE vint whole_sum(const vint *sums) { return sums[0]; }
#endif

/* As score_tile; a row of queries is `steps` words for each pass. */
INLINE void score_bytes_tile(int rows, int vecs, int64_t steps, const uint32_t *queries,
                             int64_t stride, const int32_t *bias, const char *const *keys,
                             const char *const *next, float *scores) {
    vint sums[BYTE_ROWS][TILE_VECS][BYTE_SUMS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++)
#pragma GCC unroll 2
            for (int i = 0; i < BYTE_SUMS; i++) sums[r][v][i] = i_set(0);
    for (int64_t s = 0, quarter = 0; quarter < BLOCK_UNITS; quarter++) {
        const char *line = next[quarter];
        for (int64_t end = (quarter + 1) * steps / BLOCK_UNITS; s < end; s++)
#pragma GCC unroll 2
            for (int pass = 0; pass < 2; pass++) {
                vint b[TILE_VECS];
#pragma GCC unroll 8
                for (int v = 0; v < vecs; v++) b[v] = byte_operand(keys[v] + s * LINE_BYTES, pass);
#pragma GCC unroll 8
                for (int i = 0; i < BLOCK_UNITS && !pass; i++, line += LINE_BYTES) fetch(line);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    vint word = i_set(byte_word(queries + r * stride, s, steps, pass));
#pragma GCC unroll 8
                    for (int v = 0; v < vecs; v++) {
                        vint *sum = &sums[r][v][pass % BYTE_SUMS];
                        *sum = add_bytes(*sum, b[v], word);
                    }
                }
            }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++)
            v_store(scores + r * BLOCK_KEYS + v * LANES,
                    i_to_vec(i_sub(whole_sum(sums[r][v]), i_set((uint32_t)bias[r]))));
}

/* As mix_tile; a row of weights is BYTE_WORDS words for each pass. */
INLINE void mix_bytes_tile(int rows, int vecs, int64_t steps, const uint32_t *weights,
                           const int32_t *bias, const float *step, const char *const *values,
                           const char *const *next, int64_t step_bytes, const float *fade,
                           float *acc, int64_t acc_stride) {
    const int64_t unit_steps = UNIT_KEYS / 4;
    vint sums[BYTE_ROWS][TILE_VECS][BYTE_SUMS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++)
#pragma GCC unroll 2
            for (int i = 0; i < BYTE_SUMS; i++) sums[r][v][i] = i_set(0);
    for (int64_t s = 0; s < steps; s++) {
        int64_t at = s % unit_steps * step_bytes;
        const char *unit = values[s / unit_steps] + at, *line = next[s / unit_steps] + at;
#pragma GCC unroll 2
        for (int pass = 0; pass < 2; pass++) {
            vint b[TILE_VECS];
#pragma GCC unroll 8
            for (int v = 0; v < vecs; v++) {
                b[v] = byte_operand(unit + v * LANES * 4, pass);
                if (!pass) fetch(line + v * LANES * 4);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                vint word = i_set(byte_word(weights + r * BLOCK_KEYS, s, BYTE_WORDS, pass));
#pragma GCC unroll 8
                for (int v = 0; v < vecs; v++) {
                    vint *sum = &sums[r][v][pass % BYTE_SUMS];
                    *sum = add_bytes(*sum, b[v], word);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++) {
            float *to = acc + r * acc_stride + v * LANES;
            vec before = v_mul(v_set(fade[r]), v_load(to));
            vec sum = i_to_vec(i_sub(whole_sum(sums[r][v]), i_set((uint32_t)bias[r])));
            v_store(to, v_fma(sum, v_set(step[r]), before));
        }
}

#define BYTE_CASES(call, vecs)                                                                     \
    switch (rows) {                                                                                \
    case 1: call(1, vecs); break;                                                                  \
    case 2: call(2, vecs); break;                                                                  \
    EXTRA_BYTE_CASES(call, vecs)                                                                   \
    }
#if LANES == 16
#define EXTRA_BYTE_CASES(call, vecs)                                                               \
    case 3: call(3, vecs); break;
#else
#define EXTRA_BYTE_CASES(call, vecs)
#endif
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

/* `count` numbers of a row in whole steps; returns the step, and in `bias` 128 times their sum. The step
   is zero if they are, and NaN if one was not finite: that must be seen. */
INLINE float split_row(const float *row, int64_t count, int64_t total, uint32_t *to, int32_t *bias) {
    vec most = v_zero(), trace = v_zero();
    for (int64_t i = 0; i < count; i += LANES) {
        vec x = v_load(row + i);
        most = v_max(most, v_max(x, v_sub(v_zero(), x)));
        trace = v_add(trace, v_mul(x, v_zero()));
    }
    float top = v_largest(most);
    vec up = v_set(top > 0.0f ? BYTE_TOP / top : 0.0f);
    vint sum = i_set(0);
    for (int64_t i = 0; i < count; i += LANES) {
        vint whole = i_rounded(v_mul(v_load(row + i), up));
        sum = i_add(sum, whole);
        put_whole(whole, to, i, total);
    }
    *bias = 128 * i_sum(sum);
    return top / BYTE_TOP + v_sum(trace);
}
