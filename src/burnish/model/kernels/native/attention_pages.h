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

/* int8 is kept shifted by 128, as the instruction that multiplies it wants. */
INLINE uint8_t shifted(int8_t x) { return (uint8_t)x ^ 0x80; }

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
            codes[i] = kind == PAGE_FP8 ? 0 : shifted(0);
            continue;
        }
        float x = number_at(row, i, is_f32) / step;
        codes[i] = kind == PAGE_FP8 ? fp8_of(x) : shifted((int8_t)nearbyintf(x));
    }
    return scale;
}

/* The key at `place` of a unit: its words go a line apart. */
INLINE void put_key(char *unit, int64_t place, int64_t words, const char *row) {
    for (int64_t i = 0; i < words; i++) memcpy(unit + (i * UNIT_KEYS + place) * 4, row + i * 4, 4);
}

/* The value at `place`. The first of a pair of bf16 numbers clears the second: what is not yet
   written meets a weight of zero, and zero times garbage may be NaN. */
INLINE void put_value(char *unit, int64_t place, int64_t width, int64_t bytes, const char *row) {
    if (bytes == 4) {
        memcpy(unit + place * width * 4, row, (size_t)width * 4);
    } else if (bytes == 2) {
        uint32_t *pairs = (uint32_t *)unit + place / 2 * width;
        const bf16 *from = (const bf16 *)row;
        if (place & 1)
            for (int64_t i = 0; i < width; i++)
                pairs[i] = (pairs[i] & 0xffff) | (uint32_t)from[i] << 16;
        else
            for (int64_t i = 0; i < width; i++) pairs[i] = from[i];
    } else {
        char *fours = unit + place / 4 * 4 * width;
        for (int64_t i = 0; i < width; i++) fours[4 * i + place % 4] = row[i];
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
                                     : (float)(int8_t)shifted((int8_t)codes[i]) * step;
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
        put_key(keys + unit, place, s->width * bytes / 4, (char *)codes);
        step = widened(scales[offset]);
    } else {
        put_value(keys + half_bytes(s) + unit, place, s->width, bytes, value);
        put_key(keys + unit, place, s->width * bytes / 4, key);
    }
    if (s->bounds)
        put_bounds(bounds_of(s, page, head), s->width, offset == 0, key, is_f32, s->kind, codes,
                   step);
}

/* The number in byte `i` of every word; all are bf16 numbers, nothing is rounded. */
INLINE vec byte_of(vint words, int i, int kind) {
    if (kind == PAGE_INT8) {
        vint plain = i_xor(words, i_set(0x80808080u));
        return i_to_vec(i_right_signed(i_left(plain, 24 - 8 * i), 24));
    }
    vint size = i_left(i_and(i_right(words, 8 * i), i_set(0x7f)), 20);
    vint sign = i_and(i_left(words, 24 - 8 * i), i_set(0x80000000u));
    vec x = v_mul(i_as_vec(size), v_set(0x1p120f));
    return i_as_vec(i_or(v_as_int(x), sign));
}

/* LANES words of four one-byte numbers as two vectors of words of two bf16 numbers. */
INLINE void widen_words(const char *from, char *first, char *second, int kind) {
    vint words = i_load(from), high = i_set(0xffff0000u);
    for (int half = 0; half < 2; half++) {
        vint a = v_as_int(byte_of(words, 2 * half, kind));
        vint b = v_as_int(byte_of(words, 2 * half + 1, kind));
        i_store(half ? second : first, i_or(i_right(a, 16), i_and(b, high)));
    }
}

/* A unit of one-byte keys and values as one of bf16 numbers, `to` and on. */
INLINE void widen_unit(const page_store *s, const char *keys, const char *values, char *to) {
    int64_t line = UNIT_KEYS * 4, row = s->width * 4;
    for (int64_t i = 0; i < s->width / 4; i++)
        for (int64_t v = 0; v < line; v += LANES * 4)
            widen_words(keys + i * line + v, to + 2 * i * line + v, to + (2 * i + 1) * line + v,
                        (int)s->kind);
    to += UNIT_KEYS * s->width * 2;
    for (int64_t i = 0; i < UNIT_KEYS / 4; i++)
        for (int64_t v = 0; v < row; v += LANES * 4)
            widen_words(values + i * row + v, to + 2 * i * row + v, to + (2 * i + 1) * row + v,
                        (int)s->kind);
}
