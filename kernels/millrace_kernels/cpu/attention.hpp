// What the instruction-set variants offer for paged attention.
// Shape letters: n tokens, h q heads, d head_dim.

#pragma once

#include "types.hpp"

namespace millrace {

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

struct AttentionKernels {
  // Floats that one task needs as scratch, and as partial result when its tile is split.
  std::int64_t (*scratch)(int lanes, int head_dim);
  std::int64_t (*partial)(int lanes, int head_dim);
  void (*attend[2])(const AttentionCall&, const AttentionTask&, float* scratch, float* partials);
  void (*merge[2])(const AttentionCall&, const AttentionTask& first, const float* partials,
                             std::int64_t partial_stride);
};

// K/V positions of one task at most. Fixed, so that results never depend on what else runs.
constexpr int kSplit = 256;

// Lanes that share a pass over K/V at most, unless one group alone has more.
constexpr int kMaxLanes = 32;

}  // namespace millrace
