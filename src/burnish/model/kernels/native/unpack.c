/* Numbers of the GGUF blocks that have one or two scales. Plain C: this is bound by memory. */
#include <string.h>

#include "kernels.h"

enum { BLOCK = 32, TASK_BLOCKS = 2048 };
/* Kinds as GGUF numbers them. */
enum kind { Q4_0 = 2, Q4_1 = 3, Q8_0 = 8 };

static float half_at(const uint8_t *p) {
    uint32_t half = p[0] | (uint32_t)p[1] << 8, bits;
    uint32_t sign = (half & 0x8000) << 16, exponent = half >> 10 & 31, rest = half & 0x3ff;
    float value;
    if (exponent == 0) {
        value = (float)rest * 0x1p-24f;
        return sign ? -value : value;
    }
    bits = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | rest << 13;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Ties to even; NaN stays one. */
static bf16 rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bf16)(x == x ? bits : 0x7fc0);
}

static int64_t block_bytes(enum kind kind) { return kind == Q8_0 ? 34 : kind == Q4_1 ? 20 : 18; }

static inline __attribute__((always_inline)) void unpack_block(const uint8_t *from, enum kind kind,
                                                               float *to) {
    float scale = half_at(from);
    if (kind == Q8_0) {
        for (int i = 0; i < BLOCK; i++) to[i] = scale * (float)(int8_t)from[2 + i];
        return;
    }
    float offset = kind == Q4_1 ? half_at(from + 2) : 0.0f;
    const uint8_t *pairs = from + (kind == Q4_1 ? 4 : 2);
    const int zero = kind == Q4_0 ? 8 : 0;
    for (int i = 0; i < BLOCK / 2; i++) {
        to[i] = scale * (float)((pairs[i] & 15) - zero);
        to[i + BLOCK / 2] = scale * (float)((pairs[i] >> 4) - zero);
    }
    if (kind == Q4_1)
        for (int i = 0; i < BLOCK; i++) to[i] += offset;
}

static inline __attribute__((always_inline)) void unpack_run(const uint8_t *from, enum kind kind,
                                                             int64_t blocks, int is_fp32, char *to) {
    for (int64_t b = 0; b < blocks; b++, from += block_bytes(kind)) {
        float numbers[BLOCK];
        unpack_block(from, kind, numbers);
        if (is_fp32) memcpy(to + b * BLOCK * 4, numbers, sizeof numbers);
        else
            for (int i = 0; i < BLOCK; i++) ((bf16 *)(void *)to)[b * BLOCK + i] = rounded(numbers[i]);
    }
}

void unpack_blocks(const uint8_t *raw, int kind, int64_t blocks, void *out, int is_fp32,
                   int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1)
    for (int64_t first = 0; first < blocks; first += TASK_BLOCKS) {
        int64_t count = blocks - first < TASK_BLOCKS ? blocks - first : TASK_BLOCKS;
        const uint8_t *from = raw + first * block_bytes((enum kind)kind);
        char *to = (char *)out + first * BLOCK * (is_fp32 ? 4 : 2);
        if (kind == Q4_0) unpack_run(from, Q4_0, count, is_fp32, to);
        else if (kind == Q4_1) unpack_run(from, Q4_1, count, is_fp32, to);
        else unpack_run(from, Q8_0, count, is_fp32, to);
    }
}
