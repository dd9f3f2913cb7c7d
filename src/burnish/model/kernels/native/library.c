/* What this library was built from, and what this CPU can run of it. */
#include <cpuid.h>

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

/* Tiles of bf16 (leaf 7, EDX bit 22): these CPUs multiply many rows faster than our kernels do. */
int burnish_has_amx(void) {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1);
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
