// What the instruction-set variants of the CPU kernels offer, as one table of plain functions.
//
// kernels_impl.hpp is compiled once per instruction set; each build hands out its own table, and
// module.cpp picks one when the module loads. Nothing here depends on Python or torch.
// Shape letters: n tokens, h q heads, d head_dim; m rows of x, o outputs, k inputs of a linear.

#pragma once

#include <cstdint>

namespace millrace {

struct bf16 {
  std::uint16_t bits;
};

enum class Type : int { f32 = 0, b16 = 1 };

// One attention call over one layer's pages. Strides are in elements.
struct AttentionCall {
  const void* q;   // [n, q_heads, d], rows of a head contiguous
  void* out;       // [n, q_heads, d], contiguous
  float* lse;      // [n, q_heads] or null
  const void* kv;  // [pages, 2, kv_heads, page_tokens, d], contiguous
  std::int64_t q_stride_n;
  std::int64_t q_stride_h;
  int q_heads;
  int kv_heads;
  int head_dim;
  int page_tokens;
  int window;  // 0: every earlier position is seen
  float scale;
};

// Some rows of one sequence, for one kv head, over one span of that sequence's K/V positions.
// "Lanes" are the pairs (row, q head of the group): lane = row * group + head.
struct AttentionTask {
  const std::int32_t* pages;  // page table of the sequence
  std::int64_t partial;       // first float of this task's partial result, when split
  int tile;                   // which tile (rows x kv head) the span belongs to
  int splits;                 // spans of that tile
  int first_row;              // row of q
  int rows;
  int first_position;  // position of the first row
  int kv_head;
  int begin, end;  // span of K/V positions
};

struct LinearCall {
  const void* x;       // prepared by pack_x: [m, padded_k]
  const void* weight;  // [o, k]
  const void* bias;    // [o] or null
  void* out;           // [m, o]
  std::int64_t k;
  std::int64_t o;
  int m;
};

struct Kernels {
  const char* name;

  // Floats that one task needs as scratch, and as partial result when its tile is split.
  std::int64_t (*attention_scratch)(int lanes, int head_dim);
  std::int64_t (*attention_partial)(int lanes, int head_dim);
  void (*attention[2])(const AttentionCall&, const AttentionTask&, float* scratch, float* partials);
  void (*attention_merge[2])(const AttentionCall&, const AttentionTask& first, const float* partials,
                             std::int64_t partial_stride);

  std::int64_t (*packed_bytes)(Type, int m, std::int64_t k);
  void (*pack_x[2])(const void* x, std::int64_t stride, int m, std::int64_t k, void* packed);
  void (*linear[2])(const LinearCall&, std::int64_t first, std::int64_t last);

  // residual may be null (plain norm); else total = residual + x is written and normed.
  void (*rms_norm[2])(const void* x, std::int64_t x_stride, const void* residual, void* total,
                      const void* weight, void* out, std::int64_t first, std::int64_t last,
                      std::int64_t width, float eps);
  void (*silu_mul[2])(const void* gate_up, void* out, std::int64_t first, std::int64_t last,
                      std::int64_t width);
  void (*rope[2])(void* x, std::int64_t stride_n, int heads, int head_dim, const float* cos,
                  const float* sin, std::int64_t first, std::int64_t last);
};

// K/V positions of one task at most. Fixed, so that results never depend on what else runs.
constexpr int kSplit = 256;

// Lanes that share a pass over K/V at most, unless one group alone has more.
constexpr int kMaxLanes = 32;

const Kernels& portable_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512_bf16_kernels();
#endif

}  // namespace millrace
