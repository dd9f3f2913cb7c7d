/* What works row by row. */
#define ISA avx512
#include "vector_avx512.h"

#include "functions.h"

#include "draw.h"
#include "gate.h"
#include "norm.h"
#include "rope.h"
