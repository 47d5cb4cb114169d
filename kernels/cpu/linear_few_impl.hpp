// Few rows of x: every weight is read once, and meets all rows.
//
// Sums of a row and an output stay apart by lane of k to its end, where the lanes are added up: an order
// that depends on k alone. Two bfloat16 lie in a word; where floats are multiplied, a word's halves are
// widened by a shift and a mask, and x is arranged to match: the even elements of a step, then the odd
// ones.

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
  static void arrange_elements(const float* from, X* to) { store(to, load(from)); }
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
  static void arrange_elements(const bf16* from, X* to) {
    store(to, load_even(from));
    store(to + Vec::N, load_odd(from));
  }
};
#if defined(MILLRACE_PAIR_LINEARS)
struct FewPairStep {
  using X = bf16;
  using Operand = __m512bh;
  static constexpr int kParts = 1;
  static constexpr int kElements = 32;
  static Operand weights(const bf16* w, int) { return x(w); }
  static Operand x(const X* x) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(x)); }
  static Vec multiply_add(Operand a, Operand b, Vec c) { return {_mm512_dpbf16_ps(c.v, a, b)}; }
  static void arrange(const bf16* from, X* to) { __builtin_memcpy(to, from, 64); }
  static void arrange_elements(const bf16* from, X* to) { __builtin_memcpy(to, from, 64); }
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

constexpr int kFewAhead = 768;  // bytes of a stream that are asked for before they are needed

// R outputs of M rows, `apart` from each other. x is arranged, `stride` to a row, with zeros after k.
template <class T, int M, int R>
inline void few_outputs(const typename FewStepOf<T>::type::X* x, std::int64_t stride, const T* w,
                        std::int64_t k, std::int64_t apart, const T* bias, T* out,
                        std::int64_t out_stride) {
  using S = typename FewStepOf<T>::type;
  constexpr int kLine = 64 / static_cast<int>(sizeof(T));
  constexpr int kAhead = kFewAhead / static_cast<int>(sizeof(T));
  const std::int64_t w_stride = apart * k;
  Vec sums[M][R];
  MILLRACE_UNROLL
  for (int m = 0; m < M; ++m)
    MILLRACE_UNROLL
    for (int r = 0; r < R; ++r) sums[m][r] = zero();
  std::int64_t j = 0;
  for (; j + kLine <= k; j += kLine) {
    MILLRACE_UNROLL
    for (int r = 0; r < R; ++r) __builtin_prefetch(w + r * w_stride + j + kAhead);
    MILLRACE_UNROLL
    for (int i = 0; i < kLine; i += S::kElements)
      few_step<T, M, R>(x + j + i, stride, w + j + i, w_stride, sums);
  }
  if (j < k) {
    T rest[R][kLine] = {};
    for (int r = 0; r < R; ++r)
      __builtin_memcpy(rest[r], w + r * w_stride + j, static_cast<std::size_t>(k - j) * sizeof(T));
    for (int i = 0; i < kLine; i += S::kElements)
      few_step<T, M, R>(x + j + i, stride, rest[0] + i, kLine, sums);
  }
  MILLRACE_UNROLL
  for (int m = 0; m < M; ++m) {
    float totals[4];
    sum4(sums[m][0], sums[m][R > 1 ? 1 : 0], sums[m][R > 2 ? 2 : 0], sums[m][R > 3 ? 3 : 0], totals);
    MILLRACE_UNROLL
    for (int r = 0; r < R; ++r)
      assign(out + m * out_stride + r * apart,
             bias ? totals[r] + to_float(bias[r * apart]) : totals[r]);
  }
}

template <class T, int R>
inline void few_rows(const LinearCall& c, const typename FewStepOf<T>::type::X* x,
                     std::int64_t stride, Range rows, std::int64_t output, std::int64_t apart) {
  const T* w = static_cast<const T*>(c.weight) + output * c.k;
  const T* bias = c.bias ? static_cast<const T*>(c.bias) + output : nullptr;
  T* out = static_cast<T*>(c.out) + rows.first * c.o + output;
  switch (rows.size()) {
    case 1: return few_outputs<T, 1, R>(x, stride, w, c.k, apart, bias, out, c.o);
    case 2: return few_outputs<T, 2, R>(x, stride, w, c.k, apart, bias, out, c.o);
    case 3: return few_outputs<T, 3, R>(x, stride, w, c.k, apart, bias, out, c.o);
    default: return few_outputs<T, 4, R>(x, stride, w, c.k, apart, bias, out, c.o);
  }
}

// R outputs at a time, each from its own part of the range and each the next of its part: R streams
// that run on through memory, which is what prefetchers follow. Rows past the fourth find the
// weights in the cache.
template <class T, int R>
void few_streams(const LinearCall& c, const typename FewStepOf<T>::type::X* x, std::int64_t stride,
                 Range rows, Range outputs) {
  const std::int64_t apart = outputs.size() / R;
  const std::int64_t groups = (rows.size() + 3) / 4;
  for (std::int64_t i = 0; i < apart; ++i)
    for (std::int64_t group = 0; group < groups; ++group) {
      const Range part{rows.size() * group / groups, rows.size() * (group + 1) / groups};
      few_rows<T, R>(c, x + part.first * stride, stride,
                     {rows.first + part.first, rows.first + part.last}, outputs.first + i, apart);
    }
  if (apart * R < outputs.size())
    few_streams<T, 1>(c, x, stride, rows, {outputs.first + apart * R, outputs.last});
}

// A row of x to the order of a step, with zeros from k to `stride`.
template <class S>
inline void arrange_row(const typename S::X* from, std::int64_t k, std::int64_t stride,
                        typename S::X* to) {
  using X = typename S::X;
  std::int64_t j = 0;
  for (; j + S::kElements <= k; j += S::kElements) S::arrange(from + j, to + j);
  for (; j < stride; j += S::kElements) {
    X rest[S::kElements] = {};
    if (j < k) __builtin_memcpy(rest, from + j, static_cast<std::size_t>(k - j) * sizeof(X));
    S::arrange(rest, to + j);
  }
}

// `depth` elements of a row or of an output's weights to the order of a step, with zeros where fewer are
// `left`.
template <class S, class T>
inline void arrange_elements(const T* from, std::int64_t left, std::int64_t depth,
                            typename S::X* to) {
  std::int64_t j = 0;
  for (; j < depth && j + S::kElements <= left; j += S::kElements) S::arrange_elements(from + j, to + j);
  for (; j < depth; j += S::kElements) {
    T rest[S::kElements] = {};
    if (j < left) __builtin_memcpy(rest, from + j, static_cast<std::size_t>(left - j) * sizeof(T));
    S::arrange_elements(rest, to + j);
  }
}

// Prepared rows end in a whole unit; a line more, for rows a power of two apart would share their places
// in the cache.
std::int64_t arranged_stride(Type, std::int64_t k) { return round_up(k, kFewUnit) + 16; }

std::int64_t arranged_bytes(Type type, std::int64_t k) {
  if (type == Type::f32 && k % kFewUnit == 0) return 0;  // they have the order already
  const std::size_t size = type == Type::f32 ? sizeof(float) : sizeof(FewStepOf<bf16>::type::X);
  return arranged_stride(type, k) * static_cast<std::int64_t>(size);
}

template <class T>
void prepare_arranged(const void* source, std::int64_t stride, std::int64_t rows, std::int64_t k,
                      void* target) {
  using S = typename FewStepOf<T>::type;
  const T* x = static_cast<const T*>(source);
  typename S::X* to = static_cast<typename S::X*>(target);
  const std::int64_t to_stride = arranged_stride(Type::f32, k);
  for (std::int64_t row = 0; row < rows; ++row, x += stride, to += to_stride)
    arrange_elements<S>(x, k, round_up(k, kFewUnit), to);
}

// x: arranged, the first of the rows.
template <class T>
void multiply_few(const LinearCall& c, const typename FewStepOf<T>::type::X* x, std::int64_t stride,
                  Range rows, Range outputs) {
  if (rows.size() <= 2)
    few_streams<T, 4>(c, x, stride, rows, outputs);
  else  // four would not leave registers for x
    few_streams<T, 3>(c, x, stride, rows, outputs);
}
