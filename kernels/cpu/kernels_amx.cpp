#define MILLRACE_ISA "amx"
#define MILLRACE_TABLE amx_kernels
#include "kernels_impl.hpp"
