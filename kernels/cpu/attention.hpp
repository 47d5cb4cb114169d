// What the instruction-set variants offer for paged attention.
// Shape letters: n tokens, h q heads, d head_dim.
//
// Two kernels. One takes any number of lanes: K and V blocks are packed, then multiplied with the rows
// of q in register tiles (tile.hpp) or in the matrix unit (amx.hpp). A row's result then has the same bits
// in any pass: K/V is cut at slots that depend on nothing but their number (span_end). The other is faster
// for few lanes (decode), which wait for K/V: dot products over K and V rows where they lie.

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
  int window;       // 0: every earlier position is seen
  bool causal;
  bool float_out;   // out is float32, whatever the type of q and K/V
  float scale;
  float soft_cap;   // 0: none
};

// Some rows of one sequence, for some kv heads, over one span of that sequence's K/V slots, or over all.
// "Lanes" are the pairs (row, q head): lane = (kv head * rows + row) * group + head of the group.
struct AttentionTask {
  const std::int32_t* pages;         // page table of the sequence
  const std::int32_t* q_positions;   // of these rows; null: first_position + row
  const std::int32_t* kv_positions;  // of the sequence's slots; null: slot j holds position j
  int first_row;                     // row of q
  int rows;
  int first_position;
  int kv_head;  // the first
  int heads;    // kv heads; in tiles 1
  int begin, end;  // span of K/V slots
  float* partial;  // where the result goes when the span isn't all; null: to out
};

struct AttentionKernels {
  // Floats that one task needs as scratch: in tiles, over few lanes.
  std::int64_t (*scratch[2])(int lanes, int head_dim);
  // Floats of a partial result.
  std::int64_t (*partial)(int lanes, int head_dim);
  void (*attend[2][2])(const AttentionCall&, const AttentionTask&, float* scratch);  // [few][type]
  // Join the partial results of `splits` spans, `stride` floats apart, first to last. `task` holds
  // the first of them, which takes the sum.
  void (*merge[2])(const AttentionCall&, const AttentionTask& task, int splits,
                   std::int64_t stride);
  // Join finished results over different K/V: [out's type][other's type], rows of d.
  void (*join[2][2])(void* out, float* lse, const void* other, const float* other_lse,
                     std::int64_t rows, int head_dim);
};

// Lanes of a sequence, for one kv head, up to which it counts as few.
constexpr int kFewLanes = 8;

// Elements in the rows of the kv heads that one task over few lanes takes, so that a block of their
// K/V (kBlock slots) stays in the first cache, but for a head with more.
constexpr int kFewElements = 256;

// Lanes of a sequence in tiles that share a pass over K/V, unless one group alone has more.
constexpr int kTileLanes = 192;

// K/V slots that are packed at a time.
constexpr int kTileBlock = 256;

// A span begins at a multiple of this; a sum over K/V begins at zero in each span, and then joins the
// sum of the spans before.
constexpr int kShortestSpan = 2 * kTileBlock;
constexpr int kSpansPerDoubling = 16;

// The end of the span that a slot is in: spans grow with their place, a sixteenth of the power of two
// below it, so that a long context has few.
inline int span_end(int slot) {
  int length = kShortestSpan;
  while (slot / kSpansPerDoubling / 2 >= length) length *= 2;
  return (slot / length + 1) * length;
}

// The windows of rows begin anywhere; a task begins at a multiple of this.
constexpr int kSlotUnit = 32;

}  // namespace millrace
