/* Storing keys and values of a step. */
#pragma once
#include <omp.h>

#include "attention_pages.h"

/* The first token from `i` on that does not share a page with the one before it. */
INLINE int64_t page_start(const page_store *store, const int64_t *slots, int64_t tokens, int64_t i) {
    while (i > 0 && i < tokens && slots[i] / store->page_keys == slots[i - 1] / store->page_keys) i++;
    return i;
}

void FOR_ISA(write_pages)(const page_store *store, const int64_t *slots, int64_t tokens,
                          const void *keys, int64_t key_stride, const void *values,
                          int64_t value_stride, int64_t is_f32, int num_threads) {
    int64_t bytes = is_f32 ? 4 : 2, width = store->width;
    /* Neighbouring tokens share words, so a page is filled by one thread. */
#pragma omp parallel for num_threads(num_threads) if (tokens * width > 4096)
    for (int64_t part = 0; part < num_threads; part++) {
        int64_t i = page_start(store, slots, tokens, part * tokens / num_threads);
        int64_t end = page_start(store, slots, tokens, (part + 1) * tokens / num_threads);
        for (; i < end; i++)
            for (int64_t head = 0; head < store->heads; head++)
                put_token(store, slots[i], head,
                          (const char *)keys + (i * key_stride + head * width) * bytes,
                          (const char *)values + (i * value_stride + head * width) * bytes,
                          (int)is_f32);
    }
}
