#include "latency.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace millrace {

namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 40;

// The larger root of a + b x + d x^2, infinity where the curve never crosses 0 upwards.
double root_of(double a, double b, double d) {
  if (d <= 0.0) return b > 0.0 ? -a / b : std::numeric_limits<double>::infinity();
  const double under = std::max(b * b - 4.0 * d * a, 0.0);
  if (b >= 0.0) return a < 0.0 ? -2.0 * a / (b + std::sqrt(under)) : 0.0;
  return (std::sqrt(under) - b) / (2.0 * d);
}

}  // namespace

std::int64_t Latency::tokens_within(double budget_s, std::int64_t history) const {
  if (chunk_s(1, history) > budget_s) return 0;
  std::size_t at = segments_.size() - 1;
  while (at > 0 && chunk_s(segments_[at].start_tokens, history) > budget_s) --at;
  const Segment& s = segments_[at];
  const bool last = at + 1 == segments_.size();
  const std::int64_t end = last ? kMostTokens : segments_[at + 1].start_tokens - 1;
  const std::int64_t low = std::max<std::int64_t>(s.start_tokens, 1);
  const double root = root_of(s.a - budget_s, s.b + c_ * static_cast<double>(history), s.d);
  std::int64_t guess = end;
  if (root < static_cast<double>(end)) guess = std::max(low, static_cast<std::int64_t>(root));
  return settle(guess, low, end, budget_s, history);
}

// The largest count in low..high within the budget, near `guess`; `low` itself fits.
std::int64_t Latency::settle(std::int64_t guess, std::int64_t low, std::int64_t high,
                             double budget_s, std::int64_t history) const {
  if (chunk_s(guess, history) <= budget_s) {
    low = guess;
    if (guess == high || chunk_s(guess + 1, history) > budget_s) return guess;
  } else {
    high = guess - 1;
    if (high <= low || chunk_s(high, history) <= budget_s) return std::max(high, low);
  }
  while (low < high) {  // a slope near nothing: rounding moved the root by more than a token
    const std::int64_t middle = (low + high + 1) / 2;
    if (chunk_s(middle, history) <= budget_s)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

}  // namespace millrace
