/* What this library was built from, and what this CPU can run of it. */
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels.h"

/* build.py looks for this in the file: a library of other sources is not loaded. */
const char burnish_source[] = "burnish-kernels-source:" SOURCE_DIGEST;

/* The order matches `Isa` in library.py. The builtin also asks whether the system saves the wide
   registers. */
int burnish_best_isa(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return 1;
    /* Every CPU with the one has the other. */
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") ? 3 : 2;
}

/* Whether this CPU has tiles of bf16 (0: no) and the system lets this process use them (1: no, 2:
   yes). The order matches `Tiles` in tiles.py. */
int burnish_tiles(void) {
    unsigned a = 0, b = 0, c = 0, d = 0;
    const unsigned tile_bf16 = 1u << 22, tile = 1u << 24;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & tile_bf16) == 0 || (d & tile) == 0) return 0;
    /* Whether the system saves the registers (XCR0, bits 17 and 18): it says so where it has
       switched XGETBV on. */
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c >> 27 & 1) == 0) return 1;
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low >> 17 & 3) != 3) return 1;
    /* Linux reserves the room for them in a process that asks (5.16 and later). */
    const long request = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request, tile_data) == 0 ? 2 : 1;
}

/* Threads that a parallel region of this library really gets: tests compare with torch's pool. */
int burnish_team_size(int num_threads) {
    int size = 0;
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp atomic
        size++;
    }
    return size;
}
