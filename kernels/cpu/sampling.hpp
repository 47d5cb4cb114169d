// What the instruction-set variants offer to sampling: the passes over one row of logits.

#pragma once

#include "types.hpp"

namespace millrace {

constexpr int kBuckets = 2048;

struct Peak {
  float value;  // the largest logit; NaN when any is
  std::int64_t id;  // the lowest one that has it
};

struct SamplingKernels {
  Peak (*peak)(const float* logits, std::int64_t vocab);
  // Copies logits that are at least `floor`, with their ids, in order; returns how many.
  std::int64_t (*collect)(const float* logits, std::int64_t vocab, float floor, float* some,
                          std::int32_t* ids);
  // out[i] = exp((logits[i] - peak) * inverse_temperature), 0 below e^-708; returns their sum,
  // whose order of additions depends on count alone.
  double (*weights)(const float* logits, std::int64_t count, float peak,
                    double inverse_temperature, double* out);
  // out[i] = (peak - logits[i]) * scale in whole numbers, at most kBuckets - 1.
  void (*buckets)(const float* logits, std::int64_t count, float peak, float scale,
                  std::uint16_t* out);
};

}  // namespace millrace
