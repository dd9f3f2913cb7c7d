/* Every exported function, once without its instruction set: `rms_norm` stands for
   `rms_norm_avx2` and `rms_norm_avx512`.

   bf16 values are uint16_t. All sums are fp32 and have an order that depends on the width of a row
   alone, never on how many rows there are or who computes them: the same row gives the same bits
   in any batch. */
#pragma once
#include <stdint.h>

#define CONCAT_(a, b) a##_##b
#define CONCAT(a, b) CONCAT_(a, b)
/* Each source that is compiled for an instruction set defines ISA before its includes. */
#define FOR_ISA(name) CONCAT(name, ISA)

typedef uint16_t bf16;

#define DECLARE(isa)                                                                             \
    void CONCAT(rms_norm, isa)(const bf16 *x, const bf16 *weight, bf16 *out, int64_t rows,       \
                               int64_t width, int64_t stride, float eps, int num_threads);

DECLARE(avx2)
DECLARE(avx512)

int burnish_best_isa(void);
int burnish_team_size(int num_threads);
