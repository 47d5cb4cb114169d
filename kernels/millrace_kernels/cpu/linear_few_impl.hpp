// Few rows of x: every weight is read once, in the order of memory, and meets all rows.
//
// Sums of a row and an output stay apart by lane of k until its end, in an order that depends on k
// alone. Two bfloat16 lie in a word; where floats are multiplied, a word's halves are widened by a
// shift and a mask, and x is arranged to match: the even elements of a step, then the odd ones.

template <class T>
struct FewStep {
  using X = float;
  using Operand = Vec;
  static constexpr int kParts = 1;
  static constexpr int kElements = Vec::N;
  static Operand weights(const float* w, int) { return load(w); }
  static Operand x(const X* x) { return load(x); }
  static Vec multiply_add(Operand a, Operand b, Vec c) { return fma(a, b, c); }
  static void arrange(const float* from, X* to) { store(to, load(from)); }
};
template <>
struct FewStep<bf16> {
  using X = float;
  using Operand = Vec;
  static constexpr int kParts = 2;
  static constexpr int kElements = 2 * Vec::N;
  static Operand weights(const bf16* w, int part) { return part ? load_odd(w) : load_even(w); }
  static Operand x(const X* x) { return load(x); }
  static Vec multiply_add(Operand a, Operand b, Vec c) { return fma(a, b, c); }
  static void arrange(const float* from, X* to) {
    for (int i = 0; i < Vec::N; ++i) {
      to[i] = from[2 * i];
      to[Vec::N + i] = from[2 * i + 1];
    }
  }
};
#if defined(__AVX512BF16__)
struct FewPairStep {
  using X = bf16;
  using Operand = __m512bh;
  static constexpr int kParts = 1;
  static constexpr int kElements = 32;
  static Operand weights(const bf16* w, int) { return x(w); }
  static Operand x(const X* x) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(x)); }
  static Vec multiply_add(Operand a, Operand b, Vec c) { return {_mm512_dpbf16_ps(c.v, a, b)}; }
  static void arrange(const bf16* from, X* to) { __builtin_memcpy(to, from, 64); }
};
template <class T>
struct FewStepOf { using type = FewStep<T>; };
template <>
struct FewStepOf<bf16> { using type = FewPairStep; };
#else
template <class T>
struct FewStepOf { using type = FewStep<T>; };
#endif

// sums[M][R] += x[M][k] * w[R][k], for one step of k.
template <class T, int M, int R>
inline void few_step(const typename FewStepOf<T>::type::X* x, std::int64_t x_stride, const T* w,
                     std::int64_t w_stride, Vec (&sums)[M][R]) {
  using S = typename FewStepOf<T>::type;
  MILLRACE_UNROLL
  for (int part = 0; part < S::kParts; ++part) {
    typename S::Operand rows[M];
    MILLRACE_UNROLL
    for (int m = 0; m < M; ++m)
      rows[m] = S::x(x + m * x_stride + part * (S::kElements / S::kParts));
    MILLRACE_UNROLL
    for (int r = 0; r < R; ++r) {
      const typename S::Operand weights = S::weights(w + r * w_stride, part);
      MILLRACE_UNROLL
      for (int m = 0; m < M; ++m) sums[m][r] = S::multiply_add(weights, rows[m], sums[m][r]);
    }
  }
}

constexpr int kFewAhead = 1024;  // bytes of a row that are asked for before they are needed

// R outputs of M rows; x is arranged, `stride` to a row, with zeros after k.
template <class T, int M, int R>
inline void few_outputs(const typename FewStepOf<T>::type::X* x, std::int64_t stride, const T* w,
                        std::int64_t k, const T* bias, T* out, std::int64_t out_stride) {
  using S = typename FewStepOf<T>::type;
  constexpr int kLine = 64 / static_cast<int>(sizeof(T));
  constexpr int kAhead = kFewAhead / static_cast<int>(sizeof(T));
  Vec sums[M][R];
  MILLRACE_UNROLL
  for (int m = 0; m < M; ++m)
    MILLRACE_UNROLL
    for (int r = 0; r < R; ++r) sums[m][r] = zero();
  std::int64_t j = 0;
  for (; j + kLine <= k; j += kLine) {
    // Ahead in the row, or past its end in the rows that come next.
    const std::int64_t ahead = j + kAhead < k ? j + kAhead : j + kAhead - k + R * k;
    MILLRACE_UNROLL
    for (int r = 0; r < R; ++r) __builtin_prefetch(w + r * k + ahead);
    MILLRACE_UNROLL
    for (int i = 0; i < kLine; i += S::kElements)
      few_step<T, M, R>(x + j + i, stride, w + j + i, k, sums);
  }
  if (j < k) {
    T rest[R][kLine] = {};
    for (int r = 0; r < R; ++r)
      __builtin_memcpy(rest[r], w + r * k + j, static_cast<std::size_t>(k - j) * sizeof(T));
    for (int i = 0; i < kLine; i += S::kElements)
      few_step<T, M, R>(x + j + i, stride, rest[0] + i, kLine, sums);
  }
  MILLRACE_UNROLL
  for (int m = 0; m < M; ++m) {
    float totals[(R + 3) / 4 * 4];
    MILLRACE_UNROLL
    for (int r = 0; r < R; r += 4)
      sum4(sums[m][r], sums[m][r + 1 < R ? r + 1 : r], sums[m][r + 2 < R ? r + 2 : r],
           sums[m][r + 3 < R ? r + 3 : r], totals + r);
    MILLRACE_UNROLL
    for (int r = 0; r < R; ++r)
      assign(out + m * out_stride + r, bias ? totals[r] + to_float(bias[r]) : totals[r]);
  }
}

// Sums of M rows with R outputs at a time: as many as keep the multipliers busy and fit into registers.
template <class T, int M>
void few_rows(const LinearCall& c, const typename FewStepOf<T>::type::X* x, std::int64_t stride,
              std::int64_t row, std::int64_t first, std::int64_t last) {
  constexpr int R = M == 1 ? 8 : M == 2 ? 6 : M == 3 && sizeof(T) == 4 ? 4 : 3;
  const T* weight = static_cast<const T*>(c.weight);
  const T* bias = static_cast<const T*>(c.bias);
  T* out = static_cast<T*>(c.out) + row * c.o;
  for (; first + R <= last; first += R)
    few_outputs<T, M, R>(x, stride, weight + first * c.k, c.k, bias ? bias + first : nullptr,
                         out + first, c.o);
  for (; first < last; ++first)
    few_outputs<T, M, 1>(x, stride, weight + first * c.k, c.k, bias ? bias + first : nullptr,
                         out + first, c.o);
}

constexpr std::int64_t kFewOutputs = 12;  // whose weights stay in the cache for the other rows

template <class T>
void multiply_few(const LinearCall& c, Range rows, Range outputs, float* work) {
  using S = typename FewStepOf<T>::type;
  using X = typename S::X;
  const std::int64_t stride = round_up(c.k, kFewUnit);
  X* arranged = reinterpret_cast<X*>(work);
  for (std::int64_t row = 0; row < rows.size(); ++row) {
    const X* from = static_cast<const X*>(c.x) + (rows.first + row) * c.x_stride;
    X* to = arranged + row * stride;
    std::int64_t j = 0;
    for (; j + S::kElements <= c.k; j += S::kElements) S::arrange(from + j, to + j);
    for (; j < stride; j += S::kElements) {
      X rest[S::kElements] = {};
      if (j < c.k)
        __builtin_memcpy(rest, from + j, static_cast<std::size_t>(c.k - j) * sizeof(X));
      S::arrange(rest, to + j);
    }
  }
  const std::int64_t step = rows.size() <= 4 ? outputs.size() : kFewOutputs;
  for (std::int64_t o = outputs.first; o < outputs.last; o += step) {
    const std::int64_t end = o + step < outputs.last ? o + step : outputs.last;
    for (std::int64_t row = 0; row < rows.size();) {
      const std::int64_t left = rows.size() - row;
      const X* x = arranged + row * stride;
      switch (left) {
        case 1: few_rows<T, 1>(c, x, stride, rows.first + row, o, end); break;
        case 2: few_rows<T, 2>(c, x, stride, rows.first + row, o, end); break;
        case 4: few_rows<T, 4>(c, x, stride, rows.first + row, o, end); break;
        default: few_rows<T, 3>(c, x, stride, rows.first + row, o, end);
      }
      row += left == 4 ? 4 : left < 3 ? left : 3;
    }
  }
}
