#define ISA avx2
#define ROW_ISA avx2
#include "vector_avx2.h"

#include "functions.h"

/* 6 rows x 1 panel: 12 sums of 8, 2 registers of weights and one of inputs out of 16. Few rows take
   more panels, to have as many sums under way. */
#define MAX_ROWS 6
#define MAX_PANELS 2
#define FEW_ROWS 2
#define PANELS_OF_MANY 1
#define ALL_TILES(CASE)                                                                          \
    CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(5, 1) CASE(6, 1) CASE(1, 2) CASE(2, 2)

#include "gemm_wide.h"

#include "gemm.h"
#include "layer.h"
