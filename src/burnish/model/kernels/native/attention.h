/* Attention over pages of keys and values.

   A row is one query head of one token. Its result depends on its own keys and their positions
   alone, never on the batch, the chunk, the number of threads or where the pages lie: keys are
   taken in blocks of 64 from position 0, softmax is carried from block to block within a part of
   1024 keys, and parts are merged in order. Decoding, prefilling and scoring run the same code, so
   the same row has the same bits in each.

   Layout of one page of one key/value head (S keys, D wide, in units of 16 keys; a word is one fp32
   number, two bf16 numbers or four bytes):

       keys    [S / 16][words of D][16 keys]    a word is neighbouring numbers of one key
       values  [S / 16][words of 16][D]         a word is neighbouring keys of one column
       scales  [2][S] bf16                      int8 and fp8 only: of the keys, then of the values

   so that one instruction takes 16 keys (or 16 columns) and no sum ever crosses lanes. */
#pragma once
#include "kernels.h"

enum { UNIT_KEYS = 16, BLOCK_UNITS = 4, BLOCK_KEYS = 64, PART_KEYS = 1024 };

/* What pages hold. The order matches `PageKind` in attention.py. */
enum page_kind { PAGE_BF16, PAGE_F32, PAGE_INT8, PAGE_FP8 };

/* The pages of one layer. */
typedef struct {
    char *data;
    /* Bounds of the keys, bf16 [pages][heads][2][D]: least, greatest. NULL if none are kept. */
    bf16 *bounds;
    int64_t page_keys;
    int64_t heads;
    int64_t width;
    int64_t kind;
} page_store;

/* Tokens `first` .. `first + count` of the flat batch, at positions `start` and up. Their pages are
   tables[table] and up, -1 where there is none. Position p sees keys below `sink` and the last
   `window` up to itself; window 0 is all. */
typedef struct {
    int64_t first, count, start, table, window, sink;
} page_span;

/* Queries and outputs, [tokens][heads][width], both contiguous. */
typedef struct {
    const void *queries;
    void *out;
    int64_t heads;
    int64_t is_f32;
    float scale;
    /* Per row the log of its summed exponentials, [tokens][heads]. NULL if nobody asks. */
    float *masses;
} query_batch;

/* 0, or -1 without memory. */
#define DECLARE_ATTEND(isa)                                                                        \
    int CONCAT(attend_pages, isa)(const page_store *store, const query_batch *batch,               \
                                  const page_span *spans, int64_t num_spans,                       \
                                  const int32_t *tables, int num_threads);

#define DECLARE_ATTENTION(isa)                                                                     \
    DECLARE_ATTEND(isa)                                                                            \
    /* Store keys and values [tokens][heads][width], rows of a token `stride` numbers apart. */    \
    void CONCAT(write_pages, isa)(const page_store *store, const int64_t *slots, int64_t tokens,   \
                                  const void *keys, int64_t key_stride, const void *values,        \
                                  int64_t value_stride, int64_t is_f32, int num_threads);          \
    /* out[token][head][i] >= query . key for every key of page tables[starts[token] + i]. */      \
    void CONCAT(bound_pages, isa)(const page_store *store, const query_batch *batch,               \
                                  const int64_t *starts, int64_t tokens, const int32_t *tables,    \
                                  float *out, int64_t out_stride, int num_threads);                \
    /* out[token][head][i] = log of the sum over keys of the i-th page of exp(query . key), for    \
       spans of one token. 0, or -1 without memory. */                                             \
    int CONCAT(mass_pages, isa)(const page_store *store, const query_batch *batch,                 \
                                const page_span *spans, int64_t num_spans,                         \
                                const int32_t *tables, float *out, int64_t out_stride,             \
                                int num_threads);

DECLARE_ATTENTION(avx2)
DECLARE_ATTENTION(avx512)
DECLARE_ATTENTION(avx512_bf16)
/* With tiles only the attention of long spans is another one. */
DECLARE_ATTEND(amx)
