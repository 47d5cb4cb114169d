#define MILLRACE_ISA "avx512_bf16"
#define MILLRACE_TABLE avx512_bf16_kernels
#include "kernels_impl.hpp"
