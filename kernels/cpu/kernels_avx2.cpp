#define MILLRACE_ISA "avx2"
#define MILLRACE_TABLE avx2_kernels
#include "kernels_impl.hpp"
