#define MILLRACE_ISA "portable"
#define MILLRACE_TABLE portable_kernels
#include "kernels_impl.hpp"
