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

/* A weight [outputs, inputs] packed as gemm.h says; the bias may be null. */
struct matrix {
    const bf16 *panels, *bias;
    int64_t inputs, outputs;
};

/* Weights of one decoder layer; q_norm and k_norm may be null. */
struct layer {
    struct matrix qkv, output, gate_up, down;
    const bf16 *attention_norm, *mlp_norm, *q_norm, *k_norm;
    int64_t num_heads, num_kv_heads, head_width;
    float eps;
};

/* x [rows, inputs], `stride` from row to row. */
#define DECLARE_GEMM(isa)                                                                        \
    void CONCAT(linear, isa)(const bf16 *x, int64_t rows, int64_t stride,                        \
                             const struct matrix *matrix, bf16 *out, int64_t out_stride,         \
                             int add, int num_threads);                                          \
    void CONCAT(linear_fp32, isa)(const bf16 *x, int64_t rows, int64_t stride,                   \
                                  const struct matrix *matrix, float *out, int64_t out_stride,   \
                                  int num_threads);                                              \
    /* silu(gate) * up, where `outputs` counts those of one of the two. */                       \
    void CONCAT(gated_linear, isa)(const bf16 *x, int64_t rows, int64_t stride,                  \
                                   const struct matrix *matrix, bf16 *out, int64_t out_stride,   \
                                   int num_threads);                                             \
    void CONCAT(layer_begin, isa)(const struct layer *l, const bf16 *x, int64_t rows,            \
                                  const bf16 *cosines, const bf16 *sines, bf16 *normed,          \
                                  bf16 *qkv, int num_threads);                                   \
    void CONCAT(layer_end, isa)(const struct layer *l, bf16 *x, int64_t rows,                    \
                                const bf16 *attended, bf16 *normed, bf16 *inner,                 \
                                int num_threads);

#define DECLARE(isa)                                                                             \
    void CONCAT(rms_norm, isa)(const bf16 *x, const bf16 *weight, bf16 *out, int64_t rows,       \
                               int64_t width, int64_t stride, float eps, int num_threads);                      \
    void CONCAT(head_norm, isa)(bf16 *qkv, const bf16 *q_weight, const bf16 *k_weight,           \
                                int64_t rows, int64_t stride, int64_t num_heads,                 \
                                int64_t num_kv_heads, int64_t width, float eps,                  \
                                int num_threads);                                                \
    void CONCAT(rotate, isa)(bf16 *x, int64_t rows, int64_t stride, int64_t heads,               \
                             int64_t width, const bf16 *cosines, const bf16 *sines,              \
                             int num_threads);                                                   \
    void CONCAT(silu_mul, isa)(const bf16 *both, bf16 *out, int64_t rows, int64_t width,         \
                               int64_t stride, int num_threads);                                 \
    int CONCAT(draw, isa)(const float *logits, int64_t rows, int64_t width, int64_t stride,      \
                          const float *temperatures, const double *uniforms,                     \
                          const int64_t *given, int64_t *tokens, double *logprobs,               \
                          int num_threads);

DECLARE(avx2)
DECLARE(avx512)
DECLARE_GEMM(avx2)
DECLARE_GEMM(avx512)
DECLARE_GEMM(avx512_bf16)

/* Packs the rows of `weight`, bf16 or fp32 that is rounded, as panels first, first + step, ... */
void pack_panels(const void *weight, int is_fp32, int64_t outputs, int64_t inputs, bf16 *panels,
                 int64_t first, int64_t step, int num_threads);
int all_finite(const void *values, int is_fp32, int64_t count, int num_threads);

int burnish_best_isa(void);
int burnish_tiles(void);
/* Only where the compiler knew tiles. */
int burnish_check_tiles(void);
int burnish_team_size(int num_threads);
