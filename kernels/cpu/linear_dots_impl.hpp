// Many rows of x by dot products, which add in the order of few rows. Included by linear_impl.hpp.
//
// A task copies the weights of some outputs to the first cache and multiplies them with all its rows of x.

#if defined(__AVX512F__)
constexpr int kDotRows = 6;  // rows of x that share a tile of sums in registers
#else
constexpr int kDotRows = 3;
#endif
constexpr int kDotOutputs = 4;
constexpr std::int64_t kDotDepth = 1024;  // elements of k whose weights are copied at a time

// What the tiles of a panel have in common.
template <class S>
struct DotPanel {
  const typename S::X* weights;  // [kDotOutputs, kDotDepth]
  std::int64_t depth;            // elements of k in it
  bool is_first, is_last;        // of k
};

// Adds a panel's products of M rows to their sums, which stay apart by lane of k. From panel to panel
// they are kept[M][kDotOutputs][Vec::N]; after the last one their lanes are totals[M][kDotOutputs].
template <class S, int M>
inline void dot_tile(const DotPanel<S>& panel, const typename S::X* x, std::int64_t x_stride,
                     float* kept, float* totals) {
  constexpr int kStep = 4 * Vec::N / static_cast<int>(sizeof(typename S::X));
  Vec sums[M][kDotOutputs];
  MILLRACE_UNROLL
  for (int m = 0; m < M; ++m)
    MILLRACE_UNROLL
    for (int r = 0; r < kDotOutputs; ++r)
      sums[m][r] = panel.is_first ? zero() : load(kept + (m * kDotOutputs + r) * Vec::N);
  const typename S::X* w = panel.weights;
  for (std::int64_t j = 0; j < panel.depth; j += kStep) {
    MILLRACE_UNROLL
    for (int r = 0; r < kDotOutputs; ++r)
      MILLRACE_UNROLL
      for (int m = 0; m < M; ++m)
        sums[m][r] = S::multiply_add(S::x(w + r * kDotDepth + j), S::x(x + m * x_stride + j), sums[m][r]);
  }
  MILLRACE_UNROLL
  for (int m = 0; m < M; ++m) {
    if (panel.is_last) {
      sum4(sums[m][0], sums[m][1], sums[m][2], sums[m][3], totals + m * kDotOutputs);
      continue;
    }
    MILLRACE_UNROLL
    for (int r = 0; r < kDotOutputs; ++r) store(kept + (m * kDotOutputs + r) * Vec::N, sums[m][r]);
  }
}

template <class S, int M = kDotRows>
inline void dot_up_to(std::int64_t rows, const DotPanel<S>& panel, const typename S::X* x,
                      std::int64_t x_stride, float* kept, float* totals) {
  if constexpr (M > 1)
    if (rows < M) return dot_up_to<S, M - 1>(rows, panel, x, x_stride, kept, totals);
  dot_tile<S, M>(panel, x, x_stride, kept, totals);
}

inline std::int64_t dot_work_floats(std::int64_t rows) {
  return kDotOutputs * (kDotDepth + rows * (1 + Vec::N));
}

// Rows of x are arranged. The cache fetches the next panel's weights while a panel is multiplied.
template <class T>
void multiply_dots(const LinearCall& c, Range rows, Range outputs, float* work) {
  using S = typename FewStepOf<T>::type;
  using X = typename S::X;
  constexpr int kLine = 64 / static_cast<int>(sizeof(T));
  const X* x = static_cast<const X*>(c.x) + rows.first * c.x_stride;
  const std::int64_t end = round_up(c.k, kFewUnit);
  X* weights = reinterpret_cast<X*>(work);
  float* totals = work + kDotOutputs * kDotDepth;     // [rows, kDotOutputs]
  float* kept = totals + rows.size() * kDotOutputs;  // [rows, kDotOutputs, Vec::N]
  const std::int64_t tiles = (rows.size() + kDotRows - 1) / kDotRows;
  for (std::int64_t o = outputs.first; o < outputs.last; o += kDotOutputs) {
    const std::int64_t count = o + kDotOutputs < outputs.last ? kDotOutputs : outputs.last - o;
    for (std::int64_t k = 0; k < end; k += kDotDepth) {
      const bool is_last = k + kDotDepth >= end;
      const DotPanel<S> panel{weights, is_last ? end - k : kDotDepth, k == 0, is_last};
      const std::int64_t next = is_last ? kDotOutputs * c.k - k : kDotDepth;
      for (std::int64_t i = 0; i < kDotOutputs; ++i) {
        const T* from = static_cast<const T*>(c.weight) + (o + i) * c.k + k;
        arrange_elements<S>(from, i < count ? c.k - k : 0, panel.depth, weights + i * kDotDepth);
        for (std::int64_t j = 0; j < panel.depth; j += kLine) __builtin_prefetch(from + next + j, 0, 2);
      }
      for (std::int64_t tile = 0; tile < tiles; ++tile) {  // as equal as can be
        const std::int64_t row = rows.size() * tile / tiles;
        dot_up_to<S>(rows.size() * (tile + 1) / tiles - row, panel, x + row * c.x_stride + k,
                     c.x_stride, kept + row * kDotOutputs * Vec::N, totals + row * kDotOutputs);
      }
    }
    finish<T>(c, rows, {o, o + count}, totals, kDotOutputs);
  }
}
