#define ISA avx2
#define ROW_ISA avx2
#include "vector_avx2.h"

#include "functions.h"

/* 2 rows x 2 panels: 8 sums of 8, and what weights and inputs need, out of 16 registers. */
#define MAX_ROWS 2
#define MAX_PANELS 2
#define ROWS_OF(CASE, P) CASE(1, P) CASE(2, P)
#define ALL_TILES(CASE) ROWS_OF(CASE, 1) ROWS_OF(CASE, 2)

#include "pairs.h"

#include "gemm.h"
#include "layer.h"
