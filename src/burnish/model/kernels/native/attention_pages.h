/* Where numbers lie in a page, storing them, and reading one-byte pages as bf16. */
#pragma once
#include <math.h>

#include "attention_tile.h"

INLINE int64_t bytes_per_number(int64_t kind) {
    return kind == PAGE_F32 ? 4 : kind == PAGE_BF16 ? 2 : 1;
}
INLINE int is_narrow(int64_t kind) { return kind == PAGE_INT8 || kind == PAGE_FP8; }
INLINE int64_t unit_bytes(const page_store *s) {
    return UNIT_KEYS * s->width * bytes_per_number(s->kind);
}
INLINE int64_t half_bytes(const page_store *s) { return s->page_keys / UNIT_KEYS * unit_bytes(s); }
INLINE int64_t head_bytes(const page_store *s) {
    return 2 * half_bytes(s) + (is_narrow(s->kind) ? 2 * s->page_keys * (int64_t)sizeof(bf16) : 0);
}
INLINE char *head_of(const page_store *s, int64_t page, int64_t head) {
    return s->data + (page * s->heads + head) * head_bytes(s);
}
INLINE bf16 *bounds_of(const page_store *s, int64_t page, int64_t head) {
    return s->bounds + (page * s->heads + head) * 2 * s->width;
}

INLINE float widened(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}
INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
/* To the nearest, ties to even; a NaN stays one. */
INLINE bf16 narrowed(float x) {
    uint32_t bits = bits_of(x);
    if (x != x) return 0x7fc0;
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
/* The next bf16 that is not below x (`up`) or not above it. */
INLINE bf16 rounded_out(float x, int up) {
    uint32_t bits = bits_of(x);
    int away = (bits >> 31) ? !up : up;
    if (x != x || !(bits & 0xffff)) return (bf16)(bits >> 16 | (x != x ? 0x7fc0 : 0));
    return (bf16)((bits >> 16) + (uint32_t)away);
}

/* fp8 e4m3 (no infinities, greatest 448), to the nearest, ties to even. |x| <= 448. */
INLINE uint8_t fp8_of(float x) {
    uint32_t bits = bits_of(x), sign = bits >> 24 & 0x80;
    float size = fabsf(x);
    if (size < 0x1p-6f) return (uint8_t)(sign | (uint32_t)nearbyintf(size * 0x1p9f));
    bits = bits_of(size);
    bits += 0x7ffff + (bits >> 20 & 1);
    return (uint8_t)(sign | ((bits >> 20) - (120 << 3)));
}

INLINE float number_at(const void *from, int64_t i, int is_f32) {
    return is_f32 ? ((const float *)from)[i] : widened(((const bf16 *)from)[i]);
}

/* One-byte codes of a row and their scale. The scale is rounded up to bf16 before it is used, so
   its rounding adds no error. A row that is not finite gets a NaN for a scale: it must be seen. */
INLINE bf16 quantize(const void *row, int64_t width, int is_f32, int kind, uint8_t *codes) {
    const float top = kind == PAGE_FP8 ? 448.0f : 127.0f;
    float largest = 0.0f;
    int finite = 1;
    for (int64_t i = 0; i < width; i++) {
        float size = fabsf(number_at(row, i, is_f32));
        finite &= size <= 3.4e38f;
        largest = size > largest ? size : largest;
    }
    bf16 scale = finite ? rounded_out(largest / top, 1) : 0x7fc0;
    float step = widened(scale);
    for (int64_t i = 0; i < width; i++) {
        if (!finite || step == 0.0f) {
            codes[i] = 0;
            continue;
        }
        float x = number_at(row, i, is_f32) / step;
        codes[i] = kind == PAGE_FP8 ? fp8_of(x) : (uint8_t)(int8_t)nearbyintf(x);
    }
    return scale;
}

/* The key at `place` of a unit: its words go a line apart. */
INLINE void put_key(char *unit, int64_t place, int64_t width, int64_t bytes, const char *row) {
    if (bytes == 4)
        for (int64_t i = 0; i < width; i++)
            memcpy(unit + (i * UNIT_KEYS + place) * 4, row + i * 4, 4);
    else if (bytes == 2)
        for (int64_t i = 0; i < width / 2; i++)
            memcpy(unit + (i * UNIT_KEYS + place) * 4, row + i * 4, 4);
    else
        for (int64_t i = 0; i < width / 2; i++)
            memcpy(unit + (i * UNIT_KEYS + place) * 2, row + i * 2, 2);
}

/* The value at `place`. The first of a pair clears the second: what is not yet written meets a
   weight of zero, and zero times garbage may be NaN. */
INLINE void put_value(char *unit, int64_t place, int64_t width, int64_t bytes, const char *row) {
    int odd = place & 1;
    if (bytes == 4) {
        memcpy(unit + place * width * 4, row, (size_t)width * 4);
    } else if (bytes == 2) {
        bf16 *pairs = (bf16 *)unit + (place >> 1) * 2 * width;
        for (int64_t i = 0; i < width; i++) {
            bf16 x = ((const bf16 *)row)[i];
            if (odd) pairs[2 * i + 1] = x;
            else pairs[2 * i] = x, pairs[2 * i + 1] = 0;
        }
    } else {
        uint8_t *pairs = (uint8_t *)unit + (place >> 1) * 2 * width;
        for (int64_t i = 0; i < width; i++) {
            uint8_t x = ((const uint8_t *)row)[i];
            if (odd) pairs[2 * i + 1] = x;
            else pairs[2 * i] = x, pairs[2 * i + 1] = 0;
        }
    }
}

INLINE float fp8_value(uint8_t code) {
    uint32_t bits = (uint32_t)(code & 0x7f) << 20;
    float x;
    memcpy(&x, &bits, sizeof x);
    x *= 0x1p120f;
    return (code & 0x7f) == 0x7f ? NAN : (code & 0x80) ? -x : x;
}

/* Widen the bounds of a page by one key; its first key starts them. */
INLINE void put_bounds(bf16 *bounds, int64_t width, int first, const void *row, int is_f32,
                       int64_t kind, const uint8_t *codes, float step) {
    for (int64_t i = 0; i < width; i++) {
        float x = !is_narrow(kind) ? number_at(row, i, is_f32)
                  : kind == PAGE_FP8 ? fp8_value(codes[i]) * step
                                     : (float)(int8_t)codes[i] * step;
        bf16 low = rounded_out(x, 0), high = rounded_out(x, 1);
        if (first || !(widened(low) >= widened(bounds[i]))) bounds[i] = low;
        if (first || !(widened(high) <= widened(bounds[width + i]))) bounds[width + i] = high;
    }
}

enum { MAX_WIDTH = 256 };

INLINE void put_token(const page_store *s, int64_t slot, int64_t head, const void *key,
                      const void *value, int is_f32) {
    int64_t page = slot / s->page_keys, offset = slot % s->page_keys;
    int64_t bytes = bytes_per_number(s->kind), place = offset % UNIT_KEYS;
    char *keys = head_of(s, page, head);
    int64_t unit = offset / UNIT_KEYS * unit_bytes(s);
    uint8_t codes[MAX_WIDTH];
    float step = 0.0f;
    if (is_narrow(s->kind)) {
        bf16 *scales = (bf16 *)(keys + 2 * half_bytes(s));
        scales[s->page_keys + offset] = quantize(value, s->width, is_f32, (int)s->kind, codes);
        put_value(keys + half_bytes(s) + unit, place, s->width, bytes, (char *)codes);
        scales[offset] = quantize(key, s->width, is_f32, (int)s->kind, codes);
        put_key(keys + unit, place, s->width, bytes, (char *)codes);
        step = widened(scales[offset]);
    } else {
        put_value(keys + half_bytes(s) + unit, place, s->width, bytes, value);
        put_key(keys + unit, place, s->width, bytes, key);
    }
    if (s->bounds)
        put_bounds(bounds_of(s, page, head), s->width, offset == 0, key, is_f32, s->kind, codes,
                   step);
}

/* Sixteen one-byte numbers as fp32 vectors would lie, rounded to nothing: all are bf16 numbers. */
INLINE void widen_line(const uint8_t *from, bf16 *to, int kind) {
    for (int i = 0; i < 2 * UNIT_KEYS; i += LANES) {
#if LANES == 16
        __m128i raw = _mm_loadu_si128((const void *)(from + i));
        if (kind == PAGE_INT8) {
            store_weights(to + i, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw)));
        } else {
            __m512i wide = _mm512_cvtepu8_epi32(raw);
            __m512i size = _mm512_slli_epi32(_mm512_and_si512(wide, _mm512_set1_epi32(0x7f)), 20);
            __m512i sign = _mm512_slli_epi32(_mm512_and_si512(wide, _mm512_set1_epi32(0x80)), 24);
            __m512 x = _mm512_mul_ps(_mm512_castsi512_ps(size), _mm512_set1_ps(0x1p120f));
            store_weights(to + i, _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(x), sign)));
        }
#else
        __m128i raw = _mm_loadl_epi64((const void *)(from + i));
        if (kind == PAGE_INT8) {
            store_weights(to + i, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw)));
        } else {
            __m256i wide = _mm256_cvtepu8_epi32(raw);
            __m256i size = _mm256_slli_epi32(_mm256_and_si256(wide, _mm256_set1_epi32(0x7f)), 20);
            __m256i sign = _mm256_slli_epi32(_mm256_and_si256(wide, _mm256_set1_epi32(0x80)), 24);
            __m256 x = _mm256_mul_ps(_mm256_castsi256_ps(size), _mm256_set1_ps(0x1p120f));
            store_weights(to + i, _mm256_castsi256_ps(_mm256_or_si256(_mm256_castps_si256(x), sign)));
        }
#endif
    }
}
