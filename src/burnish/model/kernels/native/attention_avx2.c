#define ISA avx2
#include "vector_avx2.h"

#include "attention_mass.h"
#include "attention_write.h"
