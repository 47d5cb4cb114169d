// What the instruction-set variants offer row by row.

#pragma once

#include "types.hpp"

namespace millrace {

// q, k and v of n tokens on their way from a fused projection to attention and its pages.
struct RopeWrite {
  void* qkv;  // [n, q_heads + 2 * kv_heads, head_dim]; q is rotated in place
  const float* cos;  // [n, head_dim / 2], and sin too
  const float* sin;
  const void* q_norm;  // [head_dim], or null for none
  const void* k_norm;
  void* kv;  // [pages, 2, kv_heads, page_tokens, head_dim]
  const std::int64_t* slots;  // [n]
  std::int64_t page_tokens;
  int q_heads;
  int kv_heads;
  int head_dim;
  float eps;
};

struct RowKernels {
  // residual may be null (plain norm); else total = residual + x is written and normed.
  void (*rms_norm[2])(const void* x, std::int64_t x_stride, const void* residual, void* total,
                      const void* weight, void* out, std::int64_t first, std::int64_t last,
                      std::int64_t width, float eps);
  void (*silu_mul[2])(const void* gate_up, void* out, std::int64_t first, std::int64_t last,
                      std::int64_t width);
  void (*rope_write_kv[2])(const RopeWrite& call, std::int64_t first, std::int64_t last);
};

}  // namespace millrace
