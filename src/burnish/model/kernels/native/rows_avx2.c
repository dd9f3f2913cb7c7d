/* What works row by row. */
#define ISA avx2
#include "vector_avx2.h"

#include "functions.h"

#include "draw.h"
#include "gate.h"
#include "norm.h"
#include "rope.h"
