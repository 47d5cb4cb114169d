// Tetris Eq. (1) of one SP degree as core/cost/latency.py has it: the same operations in the same order,
// so that both give the same doubles. Counts of tokens are whole numbers far below 2^53.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace millrace {

// a + b L + d L^2 seconds for chunks of `start_tokens` and more.
struct Segment {
  std::int64_t start_tokens;
  double a, b, d;
};

class Latency {
 public:
  // `segments` ascend and hold at least one; the first starts at 0.
  Latency(double c, std::vector<Segment> segments) : c_(c), segments_(std::move(segments)) {}

  // Seconds of a chunk of `tokens` (1 or more) on top of `history` tokens; never negative.
  double chunk_s(std::int64_t tokens, std::int64_t history) const {
    std::size_t at = segments_.size() - 1;
    while (at > 0 && segments_[at].start_tokens > tokens) --at;
    const Segment& s = segments_[at];
    const double n = static_cast<double>(tokens);
    return s.a + n * (s.b + c_ * static_cast<double>(history) + s.d * n);
  }

  // The largest chunk that takes at most `budget_s`, 0 if not even one token does.
  std::int64_t tokens_within(double budget_s, std::int64_t history) const;

 private:
  std::int64_t settle(std::int64_t guess, std::int64_t low, std::int64_t high, double budget_s,
                      std::int64_t history) const;

  double c_;
  std::vector<Segment> segments_;
};

}  // namespace millrace
