// What the instruction-set variants offer for x @ weight.T: m rows of x, o outputs, k inputs.

#pragma once

#include "types.hpp"

namespace millrace {

struct LinearCall {
  const void* x;          // [m, k] of the weight's type, or as `prepare` leaves it
  std::int64_t x_stride;  // elements of the above
  const void* weight;     // [o, k]
  const void* bias;       // [o] or null
  void* out;              // [m, o]
  std::int64_t k;
  std::int64_t o;
};

struct Range {
  std::int64_t first, last;
  std::int64_t size() const { return last - first; }
};

constexpr std::int64_t kRowBlock = 16;

// Rows of x up to which a product has a kernel for few rows.
constexpr std::int64_t kFewRows = 8;

struct LinearKernels {
  // Elements of x that a task multiplies at most: they stay in a core's second cache.
  std::int64_t task_inputs;
  // Bytes of a prepared row of x; 0 where x is multiplied as it lies. Rows are prepared in blocks of
  // kRowBlock, of which the last may be short; the memory has room for whole ones.
  std::int64_t (*prepared_bytes)(Type, std::int64_t k);
  std::int64_t (*prepared_stride)(Type, std::int64_t k);  // elements from one prepared row to the next
  void (*prepare[2])(const void* x, std::int64_t stride, std::int64_t rows, std::int64_t k, void* to);
  // Floats that `run` works in, and `rows` begin with a block.
  std::int64_t (*work_floats)(Type, std::int64_t rows, std::int64_t outputs, std::int64_t k);
  void (*run[2])(const LinearCall&, Range rows, Range outputs, float* work);
  // to[width] = sum of weights[i] * rows[which[i]], in float32.
  void (*weighted_sum[2])(const void* rows, const std::int64_t* which, const float* weights,
                          int count, std::int64_t width, void* to);
};

}  // namespace millrace
