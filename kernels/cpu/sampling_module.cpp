// Sampling: one row of logits a task. A row's token depends on that row and its settings alone.
//
// What top_k, top_p and min_p keep is a prefix of the tokens ranked by logit. The ranking is never
// made whole: tokens go into buckets by their distance from the peak, and only buckets in which
// something is decided are sorted.

#include <cmath>
#include <limits>

#include "bindings.hpp"

namespace millrace {
namespace {

constexpr std::int64_t kBlock = 512;  // logits that are weighed at once
constexpr double kReach = 64.0;       // what is less likely than e^-64 goes into one bucket
constexpr double kNoLimit = std::numeric_limits<double>::infinity();
constexpr float kFloatMax = std::numeric_limits<float>::max();

struct Filters {
  std::int64_t top_k;
  double top_p;
  double min_p;
};

struct Token {
  float logit;
  std::int32_t id;
};

struct Bucket {
  std::int64_t count;
  double mass;
};

// What a thread needs for a row; grows and stays.
struct Scratch {
  std::vector<double> sums;
  std::vector<float> logits;
  std::vector<std::int32_t> ids;
  std::vector<std::uint16_t> places;
  std::vector<Token> tokens;
  Bucket buckets[kBuckets];
};

Scratch& scratch_of_thread() {
  thread_local Scratch scratch;
  return scratch;
}

// body(first, count) for consecutive blocks of [0, size).
template <class Body>
void each_block(std::int64_t size, Body body) {
  for (std::int64_t first = 0; first < size; first += kBlock)
    body(first, std::min(kBlock, size - first));
}

struct Row {
  const float* logits;
  std::int64_t vocab;
  Peak peak;
  double inverse_temperature;

  double weigh(const float* some, std::int64_t count, double* out) const {
    return kernels().sampling.weights(some, count, peak.value, inverse_temperature, out);
  }
};

// The sum of a row's weights; those of its blocks are left in the thread's scratch.
double total_mass(const Row& row) {
  std::vector<double>& sums = scratch_of_thread().sums;
  sums.clear();
  double weights[kBlock];
  double total = 0;
  each_block(row.vocab, [&](std::int64_t first, std::int64_t count) {
    sums.push_back(row.weigh(row.logits + first, count, weights));
    total += sums.back();
  });
  return total;
}

// The first id at which the running sum of weights passes uniform times the sum of all.
std::int64_t draw(const Row& row, double uniform) {
  const double target = uniform * total_mass(row);
  const std::vector<double>& sums = scratch_of_thread().sums;
  double weights[kBlock];
  double running = 0;
  std::int64_t drawn = row.peak.id;
  for (std::int64_t first = 0; first < row.vocab; first += kBlock) {
    const double sum = sums[first / kBlock];
    if (running + sum <= target) {
      running += sum;
      continue;
    }
    const std::int64_t count = std::min(kBlock, row.vocab - first);
    row.weigh(row.logits + first, count, weights);
    // Added one by one, a block may round to less than its sum: the next block then decides.
    for (std::int64_t i = 0; i < count; ++i) {
      running += weights[i];
      if (weights[i] > 0) drawn = first + i;
      if (running > target) return drawn;
    }
  }
  return drawn;
}

// A row's likeliest tokens by logit, equal ones by lowest id.
class Ranking {
 public:
  // A token is passed while fewer than `count` and less than `mass` came before it and its weight is
  // at least `min_weight`; the first always is. The one that takes the mass above `target` is last.
  struct Limits {
    std::int64_t count;
    double mass = kNoLimit;
    double min_weight = 0;
    double target = kNoLimit;
  };
  struct Passed {
    std::int64_t count;
    double mass;
    std::int64_t last_id;
    bool settled;  // whether tokens that aren't in the ranking could be passed no more
  };

  // Takes in the tokens whose weight is at least e^-reach.
  Ranking(const Row& row, double reach) : row_(row), scratch_(scratch_of_thread()) {
    scratch_.logits.resize(row.vocab);
    scratch_.ids.resize(row.vocab);
    scratch_.places.resize(row.vocab);
    const float* logits = scratch_.logits.data();
    const double peak = row.peak.value;
    const float floor = static_cast<float>(
        std::max(peak - reach / row.inverse_temperature, -static_cast<double>(kFloatMax)));
    size_ = kernels().sampling.collect(row.logits, row.vocab, std::isinf(reach) ? -kNoLimit : floor,
                                       scratch_.logits.data(), scratch_.ids.data());
    const double lowest = *std::min_element(logits, logits + size_);
    const double range =
        std::min(peak - lowest, std::min(reach, kReach) / row.inverse_temperature);
    scale_ = static_cast<float>(std::min<double>(kBuckets / range, kFloatMax));
    std::fill_n(scratch_.buckets, kBuckets, Bucket{});
    each_block(size_, [&](std::int64_t first, std::int64_t count) {
      double weights[kBlock];
      std::uint16_t* places = scratch_.places.data() + first;
      row.weigh(logits + first, count, weights);
      kernels().sampling.buckets(logits + first, count, row.peak.value, scale_, places);
      for (std::int64_t i = 0; i < count; ++i) {
        Bucket& bucket = scratch_.buckets[places[i]];
        ++bucket.count;
        bucket.mass += weights[i];
      }
    });
  }

  Passed pass(const Limits& limits) {
    const int heavy = heavy_buckets(limits.min_weight);
    Passed passed{0, 0.0, row_.peak.id, true};
    for (int place = 0; place < kBuckets; ++place) {
      const Bucket& bucket = scratch_.buckets[place];
      if (bucket.count == 0) continue;
      const double mass = passed.mass + bucket.mass;
      if (passed.count + bucket.count <= limits.count && mass < limits.mass &&
          mass <= limits.target && place < heavy) {
        passed.count += bucket.count;
        passed.mass = mass;
        continue;
      }
      sort(place);
      for (const Token& token : scratch_.tokens) {
        double weight;
        row_.weigh(&token.logit, 1, &weight);
        const bool within = passed.count < limits.count && passed.mass < limits.mass &&
                            weight >= limits.min_weight;
        if (!within && passed.count > 0) return passed;
        ++passed.count;
        passed.mass += weight;
        if (weight > 0) passed.last_id = token.id;
        if (passed.mass > limits.target) return passed;
      }
    }
    passed.settled =
        size_ == row_.vocab || passed.count >= limits.count || passed.mass >= limits.mass;
    return passed;
  }

 private:
  // How many buckets hold tokens of at least that weight only, for certain.
  int heavy_buckets(double min_weight) const {
    if (!(min_weight > 0)) return kBuckets;
    const double end = -std::log(min_weight) / row_.inverse_temperature * scale_ - 2;
    return end >= kBuckets - 1 ? kBuckets - 1 : end > 0 ? static_cast<int>(end) : 0;
  }

  // Puts a bucket's tokens in order.
  void sort(int place) {
    if (place == sorted_) return;
    sorted_ = place;
    std::vector<Token>& tokens = scratch_.tokens;
    tokens.clear();
    constexpr std::int64_t kAtOnce = 64;
    const std::uint16_t* places = scratch_.places.data();
    for (std::int64_t first = 0; first < size_; first += kAtOnce) {
      const std::int64_t end = std::min(first + kAtOnce, size_);
      bool any = false;
      for (std::int64_t i = first; i < end; ++i) any |= places[i] == place;
      for (std::int64_t i = first; any && i < end; ++i)
        if (places[i] == place) tokens.push_back({scratch_.logits[i], scratch_.ids[i]});
    }
    const auto before = [](const Token& a, const Token& b) {
      return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
    };
    if (!std::is_sorted(tokens.begin(), tokens.end(), before))  // equal logits are: ids rise
      std::sort(tokens.begin(), tokens.end(), before);
  }

  const Row& row_;
  Scratch& scratch_;
  std::int64_t size_;
  float scale_;
  int sorted_ = -1;
};

std::int64_t draw(const Row& row, const Filters& filters, double uniform) {
  const bool whole = filters.top_k <= 0 || filters.top_k >= row.vocab;
  const bool cuts_mass = filters.top_p < 1.0;
  const double total = whole && cuts_mass ? total_mass(row) : kNoLimit;
  // Few tokens decide as a rule: look further down only where they don't.
  for (const double reach : {4.0, 7.0, 10.0, 14.0, 20.0, kNoLimit}) {
    Ranking ranking(row, reach);
    Ranking::Limits limits{whole ? row.vocab : filters.top_k};
    if (cuts_mass) {
      const Ranking::Passed first = ranking.pass(limits);
      if (!whole && !first.settled) continue;
      limits.mass = filters.top_p * (whole ? total : first.mass);
    }
    limits.min_weight = filters.min_p;
    const Ranking::Passed kept = ranking.pass(limits);
    if (!kept.settled) continue;
    limits.target = uniform * kept.mass;
    return ranking.pass(limits).last_id;
  }
  return row.peak.id;
}

void sample(Address logits, std::int64_t stride, std::int64_t rows, std::int64_t vocab,
            Address temperatures, Address top_k, Address top_p, Address min_p, Address uniforms,
            Address ids, Address peaks, int threads) {
  const GilPause pause(rows * vocab);
  parallel_for(static_cast<int>(rows), threads, [&](int i) {
    const float* own = at<const float>(logits) + i * stride;
    const Peak peak = kernels().sampling.peak(own, vocab);
    at<float>(peaks)[i] = peak.value;
    std::int64_t& id = at<std::int64_t>(ids)[i];
    id = peak.id;
    const double temperature = at<const double>(temperatures)[i];
    if (!std::isfinite(peak.value) || !(temperature > 0)) return;
    const Row row{own, vocab, peak, std::min(1 / temperature, std::numeric_limits<double>::max())};
    const Filters filters{at<const std::int64_t>(top_k)[i], at<const double>(top_p)[i],
                          at<const double>(min_p)[i]};
    const double uniform = at<const double>(uniforms)[i];
    const bool filtered = filters.top_k > 0 || filters.top_p < 1.0 || filters.min_p > 0;
    id = filtered ? draw(row, filters, uniform) : draw(row, uniform);
  });
}

}  // namespace

void bind_sampling(nb::module_& m) {
  using namespace nb::literals;
  m.def("sample", &sample, "logits"_a, "stride"_a, "rows"_a, "vocab"_a, "temperatures"_a, "top_k"_a,
        "top_p"_a, "min_p"_a, "uniforms"_a, "ids"_a, "peaks"_a, "threads"_a);
}

}  // namespace millrace
