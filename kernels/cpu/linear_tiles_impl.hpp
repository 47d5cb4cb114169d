// Many rows of x by panels of weights, the fastest way with vectors. Included by linear_impl.hpp.
//
// A task turns one panel of weights at a time, so that outputs lie side by side, and multiplies it with
// all its rows of x while it is in the first-level cache. Sums run over k in order: not as those of few rows.

template <class T>
struct Format {  // how x and a panel are held
  using Unit = FloatUnit;
  static constexpr int kUnitElements = 1;  // of k in one Unit
};
#if defined(MILLRACE_PAIR_LINEARS)
template <>
struct Format<bf16> {
  using Unit = PairUnit;
  static constexpr int kUnitElements = 2;
};
#endif

constexpr std::int64_t kDepth = 256;  // elements of k in a panel

#if defined(__AVX2__)
// A word is 4 bytes of k: a float or two bfloat16. Words of 8 outputs go to a panel's row, those that
// hold two bfloat16 to two rows where floats are multiplied.
inline void put(float* to, std::int64_t, __m256i word, const float*) { store_words(to, word); }
inline void put(float* to, std::int64_t columns, __m256i pair, const bf16*) {
  store_words(to, _mm256_slli_epi32(pair, 16));
  store_words(to + columns, _mm256_and_si256(pair, _mm256_set1_epi32(-65536)));
}
#if defined(MILLRACE_PAIR_LINEARS)
inline void put(bf16_pair* to, std::int64_t, __m256i pair, const bf16*) { store_words(to, pair); }
#endif
#endif

inline void put_one(float* panel, std::int64_t k, int columns, int column, float weight) {
  panel[k * columns + column] = weight;
}
#if defined(MILLRACE_PAIR_LINEARS)
inline void put_one(bf16_pair* panel, std::int64_t k, int columns, int column, bf16 weight) {
  bf16_pair& pair = panel[k / 2 * columns + column];
  if (k % 2)
    pair.second = weight;
  else
    pair = {weight, {0}};
}
#endif
inline void put_one(float* panel, std::int64_t k, int columns, int column, bf16 weight) {
  panel[k * columns + column] = to_float(weight);
}

// panel[depth][kTileColumns] of `count` outputs, zeros in the columns past them. Meanwhile the cache
// fetches the next panel.
template <class T>
inline void fill_panel(const T* w, std::int64_t stride, std::int64_t count, std::int64_t depth,
                       typename Format<T>::Unit::Element* panel) {
  std::int64_t turned = 0;
#if defined(__AVX2__)
  constexpr int kElements = 32 / static_cast<int>(sizeof(T));
  if (count == kTileColumns) {
    turned = depth / kElements * kElements;
    for (int column = 0; column < kTileColumns; column += 8) {
      const T* from = w + column * stride;
      for (std::int64_t j = 0; j < turned; j += kElements) {
        __m256i words[8];
        MILLRACE_UNROLL
        for (int i = 0; i < 8; ++i)
          words[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * stride + j));
        if (j / kElements % 2 == 0) {
          MILLRACE_UNROLL
          for (int i = 0; i < 8; ++i) __builtin_prefetch(from + (kTileColumns + i) * stride + j, 0, 2);
        }
        transpose(words);
        auto* to = panel + j / Format<T>::kUnitElements * kTileColumns + column;
        constexpr int kRows = kElements / Format<T>::kUnitElements / 8;
        MILLRACE_UNROLL
        for (int i = 0; i < 8; ++i)
          put(to + i * kRows * kTileColumns, kTileColumns, words[i], static_cast<const T*>(nullptr));
      }
    }
  }
#endif
  for (std::int64_t column = 0; column < kTileColumns; ++column)
    for (std::int64_t j = turned; j < depth; ++j)
      put_one(panel, j, kTileColumns, static_cast<int>(column),
              column < count ? w[column * stride + j] : T{});
}

// totals[rows][kTileColumns] (+)= x[rows][units] * panel, for up to R rows.
template <class Unit, int R = kTileRows>
inline void multiply_up_to(std::int64_t rows, const typename Unit::Element* x, std::int64_t stride,
                           const typename Unit::Element* panel, std::int64_t units, bool first,
                           float* totals, std::int64_t ld) {
  if constexpr (R > 1)
    if (rows < R)
      return multiply_up_to<Unit, R - 1>(rows, x, stride, panel, units, first, totals, ld);
  if (first)
    multiply_tile<Unit, R, false>(x, stride, panel, kTileColumns, units, totals, ld);
  else
    multiply_tile<Unit, R, true>(x, stride, panel, kTileColumns, units, totals, ld);
}

template <class T>
void multiply_tiles(const LinearCall& c, Range rows, Range outputs, float* work) {
  using Unit = typename Format<T>::Unit;
  using Element = typename Unit::Element;
  constexpr int kElements = Format<T>::kUnitElements;
  Element* panel = reinterpret_cast<Element*>(work);
  float* totals = work + kDepth * kTileColumns;
  const std::int64_t ld = round_up(outputs.size(), kTileColumns);
  const std::int64_t stride = c.x_stride / kElements;
  const Element* x = static_cast<const Element*>(c.x) + rows.first * stride;
  const T* weight = static_cast<const T*>(c.weight);
  const std::int64_t tiles = (rows.size() + kTileRows - 1) / kTileRows;
  for (std::int64_t k = 0; k < c.k; k += kDepth) {
    const std::int64_t depth = k + kDepth < c.k ? kDepth : c.k - k;
    const std::int64_t units = (depth + kElements - 1) / kElements;
    for (std::int64_t o = outputs.first; o < outputs.last; o += kTileColumns) {
      const std::int64_t count = o + kTileColumns < outputs.last ? kTileColumns : outputs.last - o;
      fill_panel<T>(weight + o * c.k + k, c.k, count, depth, panel);
      for (std::int64_t tile = 0; tile < tiles; ++tile) {  // as equal as can be
        const std::int64_t row = rows.size() * tile / tiles;
        multiply_up_to<Unit>(rows.size() * (tile + 1) / tiles - row,
                             x + row * stride + k / kElements, stride, panel, units, k == 0,
                             totals + row * ld + (o - outputs.first), ld);
      }
    }
  }
  finish<T>(c, rows, outputs, totals, ld);
}
