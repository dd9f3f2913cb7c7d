/* Lays matrices out as gemm.h reads them. Plain C: this is bound by memory. */
#include <string.h>

#include "kernels.h"

#define PANEL 16

static uint32_t rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

/* Two inputs of one output; an odd last one stands beside a zero. */
static uint32_t pair_of(const void *row, int is_fp32, int64_t k, int64_t inputs) {
    int has_second = k + 1 < inputs;
    if (is_fp32) {
        const float *p = (const float *)row + k;
        return rounded(p[0]) | (has_second ? rounded(p[1]) << 16 : 0);
    }
    const bf16 *p = (const bf16 *)row + k;
    return p[0] | (has_second ? (uint32_t)p[1] << 16 : 0);
}

static void pack_one(const char *rows, int64_t count, int is_fp32, int64_t inputs, uint32_t *out) {
    int64_t bytes = inputs * (is_fp32 ? 4 : 2);
    for (int64_t k = 0; k < inputs; k += 2, out += PANEL) {
        for (int64_t r = 0; r < count; r++)
            out[r] = pair_of(rows + r * bytes, is_fp32, k, inputs);
        for (int64_t r = count; r < PANEL; r++) out[r] = 0;
    }
}

void pack_panels(const void *weight, int is_fp32, int64_t outputs, int64_t inputs, bf16 *panels,
                 int64_t first, int64_t step, int num_threads) {
    int64_t count = (outputs + PANEL - 1) / PANEL, size = (inputs + 1) / 2 * 2 * PANEL;
#pragma omp parallel for num_threads(num_threads)
    for (int64_t i = 0; i < count; i++) {
        int64_t row = i * PANEL, rows = outputs - row < PANEL ? outputs - row : PANEL;
        const char *from = (const char *)weight + row * inputs * (is_fp32 ? 4 : 2);
        void *to = panels + (first + i * step) * size;
        if (is_fp32) pack_one(from, rows, 1, inputs, to);
        else pack_one(from, rows, 0, inputs, to);
    }
}

/* An exponent of all ones is infinity or NaN; both types have it in the same upper bits. Of fp32 the
   value that counts is the rounded one, which may have become infinite. */
int all_finite(const void *values, int is_fp32, int64_t count, int num_threads) {
    int finite = 1;
#pragma omp parallel for num_threads(num_threads) reduction(&& : finite)
    for (int64_t start = 0; start < count; start += 65536) {
        int64_t end = start + 65536 < count ? start + 65536 : count;
        uint32_t bad = 0;
        if (is_fp32)
            for (int64_t i = start; i < end; i++)
                bad |= (rounded(((const float *)values)[i]) & 0x7f80) == 0x7f80;
        else
            for (int64_t i = start; i < end; i++)
                bad |= (((const bf16 *)values)[i] & 0x7f80) == 0x7f80;
        finite = finite && !bad;
    }
    return finite;
}
