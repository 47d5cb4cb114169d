// What the instruction-set variants of the CPU kernels offer, as one table of plain functions.
//
// kernels_impl.hpp is compiled once per instruction set; each build hands out its own table, and
// isa.cpp picks one when the module loads. Nothing here depends on Python or torch.

#pragma once

#include "attention.hpp"
#include "linear.hpp"
#include "rows.hpp"
#include "sampling.hpp"

namespace millrace {

struct Kernels {
  const char* name;
  AttentionKernels attention;
  LinearKernels alike_linear;  // a row has the same bits among any number of rows
  LinearKernels fast_linear;
  bool has_matrix_unit;  // which computes `alike_linear` in bfloat16
  RowKernels rows;
  SamplingKernels sampling;
};

const Kernels& portable_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512_bf16_kernels();
const Kernels& amx_kernels();
#endif

// The table in use.
const Kernels& kernels();
// Whether a row gets the same bits in any pass; else kernels are as fast as they can be.
bool rows_are_alike();
// That of linears of so many rows.
const LinearKernels& linear_kernels(Type type, std::int64_t rows);

}  // namespace millrace
