/* The names of tiles.h in plain C, as the instructions are specified: rows and columns of each tile
   as configured, what is beyond them zero, products of bf16 pairs in two fp32 chains with fused
   multiply-adds, to the nearest with ties to even, subnormal numbers zero on the way in and out. What
   the hardware refuses is an illegal instruction here too. */
#pragma once
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct __attribute__((aligned(64))) {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;
_Static_assert(sizeof(tile_shapes) == 64, "as ldtilecfg reads it");

typedef struct {
    uint32_t words[16][16];
} emulated_tile;

static _Thread_local struct {
    int configured;
    tile_shapes shapes;
    emulated_tile tiles[8];
} emulated;

/* For tests: configurations that were loaded, and those that were not given back. */
static atomic_int emulated_opened, emulated_left;
int emulated_tiles_opened(void) { return emulated_opened; }
int emulated_tiles_left(void) { return emulated_left; }

static inline void emulated_require(int possible) {
    if (!possible) __builtin_trap();
}
static inline void emulated_tile_check(int i) {
    emulated_require(emulated.configured && i >= 0 && i < 8);
    emulated_require(emulated.shapes.rows[i] > 0 && emulated.shapes.row_bytes[i] > 0);
}

static void tiles_open(const tile_shapes *shapes) {
    emulated_require(shapes->palette == 1 && shapes->start_row == 0);
    for (int i = 0; i < 14; i++) emulated_require(shapes->reserved[i] == 0);
    for (int i = 0; i < 16; i++) {
        emulated_require(shapes->rows[i] <= (i < 8 ? 16 : 0));
        emulated_require(shapes->row_bytes[i] <= (i < 8 ? 64 : 0));
        emulated_require(!shapes->rows[i] == !shapes->row_bytes[i]);
    }
    emulated_opened++;
    if (!emulated.configured) emulated_left++;
    emulated.configured = 1;
    emulated.shapes = *shapes;
    memset(emulated.tiles, 0, sizeof emulated.tiles);
}
static void tiles_close(void) {
    if (emulated.configured) emulated_left--;
    emulated.configured = 0;
}

static inline void tile_zero(int i) {
    emulated_tile_check(i);
    memset(emulated.tiles + i, 0, sizeof(emulated_tile));
}
static inline void tile_load(int i, const void *from, int64_t stride) {
    tile_zero(i);
    for (int row = 0; row < emulated.shapes.rows[i]; row++)
        memcpy(emulated.tiles[i].words[row], (const char *)from + row * stride,
               emulated.shapes.row_bytes[i]);
}
static inline void tile_store(int i, void *to, int64_t stride) {
    emulated_tile_check(i);
    for (int row = 0; row < emulated.shapes.rows[i]; row++)
        memcpy((char *)to + row * stride, emulated.tiles[i].words[row],
               emulated.shapes.row_bytes[i]);
}

static inline uint32_t emulated_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline float emulated_number(uint32_t bits) {
    float x;
    /* A subnormal number keeps its sign alone. */
    if (!(bits & 0x7f800000u)) bits &= 0x80000000u;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static inline float emulated_normal(float x) { return emulated_number(emulated_bits(x)); }

/* EMULATED_FAULT: "illegal", or "swapped" pairs of numbers. */
static int emulated_illegal, emulated_swap;
__attribute__((constructor)) static void emulated_begin(void) {
    const char *fault = getenv("EMULATED_FAULT");
    emulated_illegal = fault && !strcmp(fault, "illegal");
    emulated_swap = fault && !strcmp(fault, "swapped");
}

/* Instead of what the installed library says of this CPU; EMULATED_TILES is another answer. */
int burnish_tiles(void) {
    const char *answer = getenv("EMULATED_TILES");
    return answer ? atoi(answer) : 2;
}

static inline void tile_dot(int sum, int left, int right) {
    emulated_tile_check(sum), emulated_tile_check(left), emulated_tile_check(right);
    emulated_require(sum != left && sum != right && left != right);
    emulated_require(!emulated_illegal);
    const tile_shapes *s = &emulated.shapes;
    emulated_require(s->rows[sum] == s->rows[left] && s->row_bytes[sum] == s->row_bytes[right] &&
                     s->row_bytes[left] / 4 == s->rows[right]);
    for (int m = 0; m < s->rows[sum]; m++) {
        float chains[2][16] = {{0}};
        for (int k = 0; k < s->row_bytes[left] / 4; k++) {
            uint32_t a = emulated.tiles[left].words[m][k];
            float low = emulated_number(a << 16), high = emulated_number(a & 0xffff0000u);
            for (int n = 0; n < s->row_bytes[sum] / 4; n++) {
                uint32_t b = emulated.tiles[right].words[k][n];
                if (emulated_swap) b = b << 16 | b >> 16;
                float b_low = emulated_number(b << 16), b_high = emulated_number(b & 0xffff0000u);
                chains[0][n] = emulated_normal(fmaf(low, b_low, chains[0][n]));
                chains[1][n] = emulated_normal(fmaf(high, b_high, chains[1][n]));
            }
        }
        uint32_t *to = emulated.tiles[sum].words[m];
        for (int n = 0; n < s->row_bytes[sum] / 4; n++) {
            float both = emulated_normal(chains[0][n] + chains[1][n]);
            to[n] = emulated_bits(emulated_normal(emulated_number(to[n]) + both));
        }
        for (int n = s->row_bytes[sum] / 4; n < 16; n++) to[n] = 0;
    }
    for (int m = s->rows[sum]; m < 16; m++)
        memset(emulated.tiles[sum].words[m], 0, sizeof emulated.tiles[sum].words[m]);
}

/* One product of whole tiles, for a test of what stands above. */
void emulated_product(float *sum, const void *left, const void *right) {
    tile_shapes whole = {.palette = 1};
    for (int i = 0; i < 8; i++) whole.rows[i] = 16, whole.row_bytes[i] = 64;
    tiles_open(&whole);
    tile_load(0, sum, 64);
    tile_load(1, left, 64);
    tile_load(2, right, 64);
    tile_dot(0, 1, 2);
    tile_store(0, sum, 64);
    tiles_close();
}
