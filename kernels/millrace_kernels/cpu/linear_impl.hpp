// x @ weight.T. Included by kernels_impl.hpp, after simd.hpp and tile.hpp.

// How x is held while weights stream past: float32, or bfloat16 where the machine multiplies pairs.
#if defined(__AVX512BF16__)
inline __m512bh load_pairs(const bf16* p) {
  return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p));
}
inline __m512bh load_pairs_part(const bf16* p, int n) {
  const __mmask32 lanes = static_cast<__mmask32>((1ull << n) - 1ull);
  return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(lanes, p));
}
struct PairStep {
  using Weight = bf16;
  using X = bf16;
  using Operand = __m512bh;
  static constexpr int N = 32;
  static Operand weight(const bf16* p) { return load_pairs(p); }
  static Operand weight_part(const bf16* p, int n) { return load_pairs_part(p, n); }
  static Operand x(const bf16* p) { return load_pairs(p); }
  static Vec fma(Operand a, Operand b, Vec c) { return {_mm512_dpbf16_ps(c.v, a, b)}; }
};
#endif

inline Vec multiply_add(Vec a, Vec b, Vec c) { return fma(a, b, c); }

template <class T>
struct FloatStep {
  using Weight = T;
  using X = float;
  using Operand = Vec;
  static constexpr int N = Vec::N;
  static Operand weight(const T* p) { return load(p); }
  static Operand weight_part(const T* p, int n) { return load_part(p, n); }
  static Operand x(const float* p) { return load(p); }
  static Vec fma(Operand a, Operand b, Vec c) { return multiply_add(a, b, c); }
};

#if defined(__AVX512BF16__)
template <class T>
struct StepOf {
  using type = FloatStep<T>;
};
template <>
struct StepOf<bf16> {
  using type = PairStep;
};
#else
template <class T>
struct StepOf {
  using type = FloatStep<T>;
};
#endif

template <class T>
using Step = typename StepOf<T>::type;

inline std::int64_t padded_k(std::int64_t k) { return round_up(k, 32); }

std::int64_t packed_bytes(Type type, int m, std::int64_t k) {
  const std::size_t element =
      type == Type::f32 ? sizeof(Step<float>::X) : sizeof(Step<bf16>::X);
  return m * padded_k(k) * static_cast<std::int64_t>(element);
}

template <class T>
void pack_x(const void* source, std::int64_t stride, int m, std::int64_t k, void* packed) {
  using X = typename Step<T>::X;
  for (int row = 0; row < m; ++row) {
    const T* x = static_cast<const T*>(source) + row * stride;
    X* to = static_cast<X*>(packed) + row * padded_k(k);
    std::int64_t j = 0;
    for (; j + Vec::N <= k; j += Vec::N) store(to + j, load(x + j));
    if (j < k) store(to + j, load_part(x + j, static_cast<int>(k - j)));
    for (j = round_up(k, Vec::N); j < padded_k(k); j += Vec::N) store(to + j, zero());
  }
}

// R outputs for M rows of x: each weight vector is loaded once for all M.
template <class T, int M, int R>
void linear_tile(const LinearCall& c, const typename Step<T>::X* x, T* out, std::int64_t first) {
  using S = Step<T>;
  const std::int64_t ldx = padded_k(c.k);
  const T* w = static_cast<const T*>(c.weight) + first * c.k;
  Vec sums[M][R];
  MILLRACE_UNROLL
  for (int m = 0; m < M; ++m)
    MILLRACE_UNROLL
    for (int r = 0; r < R; ++r) sums[m][r] = zero();
  std::int64_t j = 0;
  for (; j + S::N <= c.k; j += S::N) {
    typename S::Operand weights[R];
    MILLRACE_UNROLL
    for (int r = 0; r < R; ++r) {
      weights[r] = S::weight(w + r * c.k + j);
      __builtin_prefetch(w + (R + r) * c.k + j);  // of the next tile
    }
    MILLRACE_UNROLL
    for (int m = 0; m < M; ++m) {
      const typename S::Operand row = S::x(x + m * ldx + j);
      MILLRACE_UNROLL
      for (int r = 0; r < R; ++r) sums[m][r] = S::fma(weights[r], row, sums[m][r]);
    }
  }
  if (j < c.k) {
    MILLRACE_UNROLL
    for (int r = 0; r < R; ++r) {
      const typename S::Operand weight = S::weight_part(w + r * c.k + j, static_cast<int>(c.k - j));
      MILLRACE_UNROLL
      for (int m = 0; m < M; ++m) sums[m][r] = S::fma(weight, S::x(x + m * ldx + j), sums[m][r]);
    }
  }
  const T* bias = static_cast<const T*>(c.bias);
  MILLRACE_UNROLL
  for (int m = 0; m < M; ++m) {
    float result[R];
    if constexpr (R == 1) {
      result[0] = sum(sums[m][0]);
    } else {
      MILLRACE_UNROLL
      for (int r = 0; r < R; r += 4)
        sum4(sums[m][r], sums[m][r + 1], sums[m][r + 2], sums[m][r + 3], result + r);
    }
    T* to = out + m * c.o + first;
    MILLRACE_UNROLL
    for (int r = 0; r < R; ++r)
      assign(to + r, bias ? result[r] + to_float(bias[first + r]) : result[r]);
  }
}

template <class T, int M>
void linear_rows(const LinearCall& c, int row, std::int64_t first, std::int64_t last) {
#if defined(__AVX512F__)
  constexpr int R = M <= 2 ? 8 : 4;
#else
  constexpr int R = 4;
#endif
  const auto* x = static_cast<const typename Step<T>::X*>(c.x) + row * padded_k(c.k);
  T* out = static_cast<T*>(c.out) + row * c.o;
  for (; first + R <= last; first += R) linear_tile<T, M, R>(c, x, out, first);
  for (; first < last; ++first) linear_tile<T, M, 1>(c, x, out, first);
}

#if defined(__AVX512F__)
constexpr int kRowTile = 4;
#else
constexpr int kRowTile = 2;
#endif

// Few enough outputs at a time that their weights stay in the cache for every row tile.
constexpr std::int64_t kOutputTile = 8;

template <class T>
void linear(const LinearCall& c, std::int64_t first, std::int64_t last) {
  if (c.m == 1) return linear_rows<T, 1>(c, 0, first, last);
  for (; first < last; first += kOutputTile) {
    const std::int64_t end = first + kOutputTile < last ? first + kOutputTile : last;
    for (int row = 0; row < c.m; row += kRowTile) {
      switch (c.m - row) {
        case 1: linear_rows<T, 1>(c, row, first, end); break;
        case 2: linear_rows<T, 2>(c, row, first, end); break;
#if defined(__AVX512F__)
        case 3: linear_rows<T, 3>(c, row, first, end); break;
#endif
        default: linear_rows<T, kRowTile>(c, row, first, end);
      }
    }
  }
}

constexpr LinearKernels kLinear = {
    packed_bytes,
    {pack_x<float>, pack_x<bf16>},
    {linear<float>, linear<bf16>},
};
