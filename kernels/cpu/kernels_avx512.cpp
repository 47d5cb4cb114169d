#define MILLRACE_ISA "avx512"
#define MILLRACE_TABLE avx512_kernels
#include "kernels_impl.hpp"
