#define ISA avx512
#define ROW_ISA avx512
#include "vector_avx512.h"

#include "functions.h"

/* 12 rows x 2 panels: 24 sums, 2 registers of weights and one of inputs out of 32. Few rows take more
   panels, to have as many sums under way. */
#define MAX_ROWS 12
#define MAX_PANELS 4
#define FEW_ROWS 6
#define PANELS_OF_MANY 2
#define ROWS_OF(CASE, P) CASE(1, P) CASE(2, P) CASE(3, P) CASE(4, P) CASE(5, P) CASE(6, P)
#define MANY_ROWS_OF(CASE, P)                                                                    \
    CASE(7, P) CASE(8, P) CASE(9, P) CASE(10, P) CASE(11, P) CASE(12, P)
#define ALL_TILES(CASE)                                                                          \
    ROWS_OF(CASE, 1) ROWS_OF(CASE, 2) ROWS_OF(CASE, 4) MANY_ROWS_OF(CASE, 1) MANY_ROWS_OF(CASE, 2)

#include "gemm_wide.h"

#include "gemm.h"
#include "layer.h"
