// The passes of sampling over one row of logits. Included by kernels_impl.hpp.
//
// Doubles come as the compiler's own vectors: there is little to do with them.

#if defined(__AVX512F__)
constexpr int kWideBytes = 64;
#elif defined(__AVX2__)
constexpr int kWideBytes = 32;
#else
constexpr int kWideBytes = 16;
#endif
typedef double Wide __attribute__((vector_size(kWideBytes)));
typedef long long WideBits __attribute__((vector_size(kWideBytes)));
typedef float Narrow __attribute__((vector_size(kWideBytes / 2)));
constexpr int kWide = kWideBytes / 8;

// e^x for x <= 0 to about 1 ulp, and 0 below -708. Splits x = n ln 2 + r, then a polynomial in r
// (e^r interpolated at Chebyshev nodes of [-ln 2 / 2, ln 2 / 2], off by 4e-18 of it), taken in pairs
// to keep the chain of operations short.
inline Wide exp(Wide x) {
  constexpr double a[] = {
      1.0,                     1.0,                     0x1.0000000000011p-1,
      0x1.555555555555ap-3,    0x1.555555554f0bap-5,    0x1.111111110f21ep-7,
      0x1.6c16c1880029fp-10,   0x1.a01a01b1461c5p-13,   0x1.a01991a10d9aep-16,
      0x1.71ddf56d8deb5p-19,   0x1.28b4101c77212p-22,   0x1.af632a0f7e2cep-26};
  constexpr double kToWhole = 0x1.8p52;  // added, it leaves a number's whole part in the low bits
  const WideBits in_range = x >= -708.0;
  x = reinterpret_cast<Wide>(reinterpret_cast<WideBits>(x) & in_range);
  const Wide shifted = x * 0x1.71547652b82fep+0 + kToWhole;
  const Wide n = shifted - kToWhole;
  const Wide r = x - n * 0x1.62e42feep-1 - n * 0x1.a39ef35793c76p-33;
  const Wide r2 = r * r;
  const Wide r4 = r2 * r2;
  const Wide low = (a[0] + a[1] * r) + (a[2] + a[3] * r) * r2;
  const Wide middle = (a[4] + a[5] * r) + (a[6] + a[7] * r) * r2;
  const Wide high = (a[8] + a[9] * r) + (a[10] + a[11] * r) * r2;
  const Wide p = low + (middle + high * r4) * r4;
  const WideBits power = (reinterpret_cast<WideBits>(shifted) + 1023) << 52;
  return reinterpret_cast<Wide>(reinterpret_cast<WideBits>(p * reinterpret_cast<Wide>(power)) &
                                in_range);
}

// One pass: the largest value of each block, then the first place in the block that set the record.
Peak peak(const float* logits, std::int64_t vocab) {
  constexpr std::int64_t kBlock = 1024;
  Peak best{-__builtin_inff(), 0};
  Vec positive = zero();  // NaN as soon as there is one: max hands it on, and nothing is -infinite
  bool has_nan = false;
  for (std::int64_t first = 0; first < vocab; first += kBlock) {
    const std::int64_t last = first + kBlock < vocab ? first + kBlock : vocab;
    Vec largest_of[4] = {set1(best.value), set1(best.value), set1(best.value), set1(best.value)};
    std::int64_t j = first;
    for (; j + 4 * Vec::N <= last; j += 4 * Vec::N) {
      MILLRACE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const Vec a = load(logits + j + i * Vec::N);
        largest_of[i] = max(largest_of[i], a);
        positive = add(positive, max(zero(), a));
      }
    }
    float value = largest(max(max(largest_of[0], largest_of[1]), max(largest_of[2], largest_of[3])));
    for (; j < last; ++j) {
      value = logits[j] > value ? logits[j] : value;
      has_nan |= logits[j] != logits[j];
    }
    if (value > best.value) {
      best.value = value;
      for (best.id = first; logits[best.id] != value;) ++best.id;
    }
  }
  float lanes[Vec::N];
  store(lanes, positive);
  for (int i = 0; i < Vec::N; ++i) has_nan |= lanes[i] != lanes[i];
  if (has_nan) best.value = __builtin_nanf("");
  return best;
}

std::int64_t collect(const float* logits, std::int64_t vocab, float floor, float* some,
                     std::int32_t* ids) {
  const Vec bound = set1(floor);
  std::int64_t found = 0;
  const auto take = [&](std::int64_t id) {
    some[found] = logits[id];
    ids[found++] = static_cast<std::int32_t>(id);
  };
  std::int64_t j = 0;
  for (; j + 4 * Vec::N <= vocab; j += 4 * Vec::N) {
    std::uint64_t bits = 0;
    MILLRACE_UNROLL
    for (int i = 0; i < 4; ++i) bits |= at_least(load(logits + j + i * Vec::N), bound) << (i * Vec::N);
    for (; bits; bits &= bits - 1) take(j + __builtin_ctzll(bits));
  }
  for (; j < vocab; ++j)
    if (logits[j] >= floor) take(j);
  return found;
}

double weights(const float* logits, std::int64_t count, float peak, double inverse_temperature,
               double* out) {
  Wide sums[2] = {};
  std::int64_t j = 0;
  for (; j + 2 * kWide <= count; j += 2 * kWide) {
    MILLRACE_UNROLL
    for (int i = 0; i < 2; ++i) {
      Narrow logit;
      __builtin_memcpy(&logit, logits + j + i * kWide, sizeof(logit));
      const Wide below = __builtin_convertvector(logit, Wide) - static_cast<double>(peak);
      const Wide weight = exp(below * inverse_temperature);
      __builtin_memcpy(out + j + i * kWide, &weight, sizeof(weight));
      sums[i] += weight;
    }
  }
  double sum = 0;
  for (int i = 0; i < kWide; ++i) sum += sums[0][i] + sums[1][i];
  for (; j < count; ++j) {
    const Wide below = Wide{} + (static_cast<double>(logits[j]) - static_cast<double>(peak));
    out[j] = exp(below * inverse_temperature)[0];
    sum += out[j];
  }
  return sum;
}

void buckets(const float* logits, std::int64_t count, float peak, float scale, std::uint16_t* out) {
  const Vec top = set1(peak), factor = set1(scale), finite = set1(__FLT_MAX__);
  const Vec end = set1(static_cast<float>(kBuckets - 1));
  float places[Vec::N];
  for (std::int64_t j = 0; j < count; j += Vec::N) {
    const int lanes = static_cast<int>(count - j < Vec::N ? count - j : Vec::N);
    const Vec a = lanes == Vec::N ? load(logits + j) : load_part(logits + j, lanes);
    store(places, min(end, mul(min(finite, sub(top, a)), factor)));
    for (int i = 0; i < lanes; ++i)
      out[j + i] = static_cast<std::uint16_t>(static_cast<int>(places[i]));
  }
}

constexpr SamplingKernels kSampling = {peak, collect, weights, buckets};
