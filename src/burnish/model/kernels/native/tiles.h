/* Tiles of AMX: eight registers of 16 rows of 64 bytes. Everything that attention_tiles.h does with
   them goes through these names, so that a test can compile it with tiles in plain C.

   The compiler knows nothing of what a tile instruction reads. What it read would be left unwritten
   without the fences, and parts of a configuration on the stack were (GCC 12: an invalid one is an
   illegal instruction at the first load). */
#pragma once
#include <immintrin.h>
#include <stdint.h>

typedef struct __attribute__((aligned(64))) {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

#define TILES_FENCE() __asm__ volatile("" ::: "memory")

/* The configuration belongs to the thread. A thread that keeps one makes every switch of context
   save 8 KB, so it is given back. */
#define tiles_open(shapes)                                                                         \
    do {                                                                                           \
        TILES_FENCE();                                                                             \
        _tile_loadconfig(shapes);                                                                  \
    } while (0)
#define tiles_close() _tile_release()

/* Tiles are named by plain numbers, 0 to 7. */
#define tile_zero(tile) _tile_zero(tile)
#define tile_load(tile, from, stride)                                                              \
    do {                                                                                           \
        TILES_FENCE();                                                                             \
        _tile_loadd(tile, from, stride);                                                           \
    } while (0)
#define tile_store(tile, to, stride)                                                               \
    do {                                                                                           \
        _tile_stored(tile, to, stride);                                                            \
        TILES_FENCE();                                                                             \
    } while (0)
/* sum[m][n] += left[m][k] . right[k][n], where each entry of left and right is two bf16 numbers. */
#define tile_dot(sum, left, right) _tile_dpbf16ps(sum, left, right)
