// What the instruction-set variants offer for x @ weight.T: m rows of x, o outputs, k inputs.

#pragma once

#include "types.hpp"

namespace millrace {

struct LinearCall {
  const void* x;       // prepared by pack_x: [m, padded_k]
  const void* weight;  // [o, k]
  const void* bias;    // [o] or null
  void* out;           // [m, o]
  std::int64_t k;
  std::int64_t o;
  int m;
};

struct LinearKernels {
  std::int64_t (*packed_bytes)(Type, int m, std::int64_t k);
  void (*pack_x[2])(const void* x, std::int64_t stride, int m, std::int64_t k, void* packed);
  void (*run[2])(const LinearCall&, std::int64_t first, std::int64_t last);
};

}  // namespace millrace
