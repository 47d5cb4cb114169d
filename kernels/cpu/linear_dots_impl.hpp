// Many rows of x by dot products, which add in the order of few rows. Included by linear_impl.hpp.
//
// A task copies the weights of some outputs to the cache and multiplies them with all its rows of x.

#if defined(__AVX512F__)
constexpr int kDotRows = 6;  // rows of x that share a tile of sums in registers
#else
constexpr int kDotRows = 3;
#endif
constexpr int kDotOutputs = 4;
constexpr std::int64_t kSweep = 16;       // outputs whose weights are copied at a time

// Adds up to kSumDepth elements of k, of M rows and kDotOutputs outputs, to totals[M][kSweep].
template <class S, int M>
inline void dot_tile(const typename S::X* x, std::int64_t x_stride, const typename S::X* w,
                     std::int64_t depth, bool is_first, float* totals) {
  constexpr int kStep = 4 * Vec::N / static_cast<int>(sizeof(typename S::X));
  Vec sums[M][kDotOutputs];
  MILLRACE_UNROLL
  for (int m = 0; m < M; ++m)
    MILLRACE_UNROLL
    for (int r = 0; r < kDotOutputs; ++r) sums[m][r] = zero();
  for (std::int64_t j = 0; j < depth; j += kStep) {
    MILLRACE_UNROLL
    for (int r = 0; r < kDotOutputs; ++r)
      MILLRACE_UNROLL
      for (int m = 0; m < M; ++m)
        sums[m][r] = S::multiply_add(S::x(w + r * kSumDepth + j), S::x(x + m * x_stride + j), sums[m][r]);
  }
  MILLRACE_UNROLL
  for (int m = 0; m < M; ++m)
    add_totals(sums[m][0], sums[m][1], sums[m][2], sums[m][3], is_first, totals + m * kSweep);
}

template <class S, int M = kDotRows>
inline void dot_up_to(std::int64_t rows, const typename S::X* x, std::int64_t x_stride,
                      const typename S::X* w, std::int64_t depth, bool is_first, float* totals) {
  if constexpr (M > 1)
    if (rows < M) return dot_up_to<S, M - 1>(rows, x, x_stride, w, depth, is_first, totals);
  dot_tile<S, M>(x, x_stride, w, depth, is_first, totals);
}

template <class T>
void multiply_dots(const LinearCall& c, Range rows, Range outputs, float* work) {
  using S = typename FewStepOf<T>::type;
  using X = typename S::X;
  const std::int64_t stride = round_up(c.k, kFewUnit);
  X* x = reinterpret_cast<X*>(work);  // [rows, stride]
  X* weights = reinterpret_cast<X*>(work + rows.size() * stride);  // [kSweep, kSumDepth]
  float* totals = work + rows.size() * stride + kSweep * kSumDepth;  // [rows, kSweep]
  for (std::int64_t row = 0; row < rows.size(); ++row)
    arrange_row<S>(static_cast<const X*>(c.x) + (rows.first + row) * c.x_stride, c.k, stride,
                   x + row * stride);
  const std::int64_t tiles = (rows.size() + kDotRows - 1) / kDotRows;
  for (std::int64_t o = outputs.first; o < outputs.last; o += kSweep) {
    const std::int64_t count = o + kSweep < outputs.last ? kSweep : outputs.last - o;
    for (std::int64_t k = 0; k < stride; k += kSumDepth) {
      const std::int64_t depth = k + kSumDepth < stride ? kSumDepth : stride - k;
      for (std::int64_t i = 0; i < round_up(count, kDotOutputs); ++i)
        arrange_weights<S>(static_cast<const T*>(c.weight) + (o + i) * c.k + k,
                           i < count ? c.k - k : 0, depth, weights + i * kSumDepth);
      for (std::int64_t tile = 0; tile < tiles; ++tile) {  // as equal as can be
        const std::int64_t row = rows.size() * tile / tiles;
        const std::int64_t size = rows.size() * (tile + 1) / tiles - row;
        for (std::int64_t i = 0; i < count; i += kDotOutputs)
          dot_up_to<S>(size, x + row * stride + k, stride, weights + i * kSumDepth, depth, k == 0,
                    totals + row * kSweep + i);
      }
    }
    finish<T>(c, rows, {o, o + count}, totals, kSweep);
  }
}
