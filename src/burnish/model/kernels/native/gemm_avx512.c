#define ISA avx512
#define ROW_ISA avx512
#include "vector_avx512.h"

#include "functions.h"

/* 6 rows x 2 panels: 12 sums, 4 registers of weights and 2 of inputs. */
#define MAX_ROWS 6
#define MAX_PANELS 2
#define ROWS_OF(CASE, P) CASE(1, P) CASE(2, P) CASE(3, P) CASE(4, P) CASE(5, P) CASE(6, P)
#define ALL_TILES(CASE) ROWS_OF(CASE, 1) ROWS_OF(CASE, 2)

#include "pairs.h"

#include "gemm.h"
#include "layer.h"
