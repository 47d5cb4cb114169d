// x @ weight.T. Included by kernels_impl.hpp, after tile.hpp.
//
// Weights stay as the checkpoint has them, [o, k]. Up to kFewRows rows of x go along with the weights
// as they stream past (linear_few_impl.hpp). For more, a task turns one panel of weights at a time, so
// that outputs lie side by side, and multiplies it with all its rows of x while it is in the
// first-level cache. The order of sums is fixed in either: a row's result has the same bits in any
// batch of few, and in any batch of many.

namespace linears {

template <class T>
struct Format {  // how x and a panel are held
  using Unit = FloatUnit;
  static constexpr int kUnitElements = 1;  // of k in one Unit
};
#if defined(__AVX512BF16__)
template <>
struct Format<bf16> {
  using Unit = PairUnit;
  static constexpr int kUnitElements = 2;
};
#endif

constexpr std::int64_t kDepth = 256;  // elements of k in a panel
constexpr int kFewRows = 8;
constexpr int kFewUnit = 64;  // a multiple of every step of few rows

#if defined(__AVX2__)
// A word is 4 bytes of k: a float or two bfloat16. Words of 8 outputs go to a panel's row, those that
// hold two bfloat16 to two rows where floats are multiplied.
inline void put(float* to, std::int64_t, __m256i word, const float*) { store_words(to, word); }
inline void put(float* to, std::int64_t columns, __m256i pair, const bf16*) {
  store_words(to, _mm256_slli_epi32(pair, 16));
  store_words(to + columns, _mm256_and_si256(pair, _mm256_set1_epi32(-65536)));
}
#if defined(__AVX512BF16__)
inline void put(bf16_pair* to, std::int64_t, __m256i pair, const bf16*) { store_words(to, pair); }
#endif
#endif

inline void put_one(float* panel, std::int64_t k, int columns, int column, float weight) {
  panel[k * columns + column] = weight;
}
#if defined(__AVX512BF16__)
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
void finish(const LinearCall& c, Range rows, Range outputs, const float* totals, std::int64_t ld) {
  const std::int64_t width = outputs.size();
  const std::int64_t full = width / Vec::N * Vec::N;
  const int rest = static_cast<int>(width - full);
  const T* bias = static_cast<const T*>(c.bias);
  if (bias) bias += outputs.first;
  for (std::int64_t row = rows.first; row < rows.last; ++row, totals += ld) {
    T* out = static_cast<T*>(c.out) + row * c.o + outputs.first;
    for (std::int64_t j = 0; j < full; j += Vec::N) {
      const Vec total = load(totals + j);
      store(out + j, bias ? add(total, load(bias + j)) : total);
    }
    if (rest) {
      const Vec total = load_part(totals + full, rest);
      store_part(out + full, bias ? add(total, load_part(bias + full, rest)) : total, rest);
    }
  }
}

template <class T>
void multiply(const LinearCall& c, Range rows, Range outputs, float* work) {
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
                                            x + row * stride + k / kElements, stride, panel, units,
                                            k == 0, totals + row * ld + (o - outputs.first), ld);
      }
    }
  }
  finish<T>(c, rows, outputs, totals, ld);
}

std::int64_t work_floats(std::int64_t rows, std::int64_t outputs, std::int64_t k) {
  const std::int64_t few = rows <= kFewRows ? rows * round_up(k, kFewUnit) : 0;
  const std::int64_t panels = kDepth * kTileColumns + rows * round_up(outputs, kTileColumns);
  return few > panels ? few : panels;
}

#include "linear_few_impl.hpp"

template <class T>
void run(const LinearCall& c, Range rows, Range outputs, float* work) {
  if (rows.size() <= kFewRows)
    multiply_few<T>(c, rows, outputs, work);
  else
    multiply<T>(c, rows, outputs, work);
}

template <bool Pairs>
struct PreparedAs { using type = float; };
template <>
struct PreparedAs<true> { using type = bf16; };
constexpr bool kPairs = Format<bf16>::kUnitElements == 2;
using Prepared = PreparedAs<kPairs>::type;

// A line more than the row: rows a power of two apart would share their places in the cache.
std::int64_t prepared_stride(std::int64_t k) { return round_up(k, 32) + 16; }

std::int64_t prepared_bytes(Type type, std::int64_t k) {
  return type == Type::f32 ? 0 : prepared_stride(k) * (kPairs ? 2 : 4);
}

// To floats, or where pairs are multiplied to rows that end in a whole pair.
void prepare_bf16(const void* source, std::int64_t stride, std::int64_t rows, std::int64_t k,
                  void* target) {
  using To = Prepared;
  const bf16* x = static_cast<const bf16*>(source);
  To* to = static_cast<To*>(target);
  for (std::int64_t row = 0; row < rows; ++row, x += stride, to += prepared_stride(k)) {
    std::int64_t j = 0;
    for (; j + Vec::N <= k; j += Vec::N) store(to + j, load(x + j));
    if (j < k) store(to + j, load_part(x + j, static_cast<int>(k - j)));
  }
}

template <class T>
void weighted_sum(const void* rows, const std::int64_t* which, const float* weights, int count,
                  std::int64_t width, void* target) {
  const T* from = static_cast<const T*>(rows);
  T* to = static_cast<T*>(target);
  for (std::int64_t j = 0; j < width; j += Vec::N) {
    const int lanes = width - j < Vec::N ? static_cast<int>(width - j) : Vec::N;
    Vec total = zero();
    for (int i = 0; i < count; ++i)
      total = fma(set1(weights[i]), load_part(from + which[i] * width + j, lanes), total);
    store_part(to + j, total, lanes);
  }
}

constexpr LinearKernels kLinear = {
    prepared_bytes,
    prepared_stride,
    {nullptr, prepare_bf16},
    work_floats,
    {run<float>, run<bf16>},
    {weighted_sum<float>, weighted_sum<bf16>},
};

}  // namespace linears

using linears::kLinear;
