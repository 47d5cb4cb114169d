// What the instruction-set variants offer row by row.

#pragma once

#include "types.hpp"

namespace millrace {

struct RowKernels {
  // residual may be null (plain norm); else total = residual + x is written and normed.
  void (*rms_norm[2])(const void* x, std::int64_t x_stride, const void* residual, void* total,
                      const void* weight, void* out, std::int64_t first, std::int64_t last,
                      std::int64_t width, float eps);
  void (*silu_mul[2])(const void* gate_up, void* out, std::int64_t first, std::int64_t last,
                      std::int64_t width);
  void (*rope[2])(void* x, std::int64_t stride_n, int heads, int head_dim, const float* cos,
                  const float* sin, std::int64_t first, std::int64_t last);
};

}  // namespace millrace
