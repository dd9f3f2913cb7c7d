#define ISA avx512_bf16
#include "vector_avx512.h"

#include "attention_mass.h"
#include "attention_write.h"
