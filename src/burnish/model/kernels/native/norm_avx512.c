#define ISA avx512
#include "vector_avx512.h"

#include "norm.h"
