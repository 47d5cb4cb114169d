// Packing blocks of K and V into panels that tiles multiply. Included by kernels_impl.hpp after
// attention_impl.hpp.
//
// While K is packed, the same slots' V is asked for, and the next block's K: decode waits for memory,
// and K/V that no cache holds is on its way all the time.
//
// A unit of tile.hpp holds kPack neighbours of the dimension that is summed over: of d in q K^T, of
// slots in weights V.

constexpr std::int64_t kPanel = (kTileBlock + 1) * kTileColumns;  // units of a panel of V

template <class T>
struct Packing {
  using Unit = FloatUnit;
  using Weight = float;
};
#if defined(__AVX512BF16__)
template <>
struct Packing<bf16> {
  using Unit = PairUnit;
  using Weight = bf16;
};
#endif
template <class Unit>
constexpr int kPack = 1;
template <class Unit>
constexpr int kUnits = 1;  // a tile multiplies a multiple of so many units; zeros fill up
#if defined(__AVX512BF16__)
template <>
constexpr int kPack<PairUnit> = 2;
#endif
#if defined(__AMX_BF16__)
template <>
constexpr int kUnits<PairUnit> = kAmxElements / 2;
#endif
template <class Unit>
inline int units_of(int elements) {
  return static_cast<int>(round_up((elements + kPack<Unit> - 1) / kPack<Unit>, kUnits<Unit>));
}

// Eight units, and the transposition of eight rows of eight.
#if defined(__AVX2__)
using Units = __m256i;
inline Units as_floats(const float* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline Units as_floats(const bf16* p) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
}
inline Units as_pairs(const bf16* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline Units zipped(const bf16* first, const bf16* second) {
  return _mm256_or_si256(_mm256_srli_epi32(as_floats(first), 16), as_floats(second));
}
inline void store_units(void* out, Units a) { store_words(out, a); }
template <class Element>
inline void store_transposed(Units (&row)[8], Element* out, int stride) {
  transpose(row);
  MILLRACE_UNROLL
  for (int i = 0; i < 8; ++i) store_units(out + i * stride, row[i]);
}
#else
struct Units {
  float v[8];
};
template <class T>
inline Units as_floats(const T* p) {
  Units units;
  for (int i = 0; i < 8; ++i) units.v[i] = to_float(p[i]);
  return units;
}
inline void store_units(float* out, Units a) { __builtin_memcpy(out, a.v, sizeof(a.v)); }
inline void store_transposed(const Units (&row)[8], float* out, int stride) {
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 8; ++j) out[i * stride + j] = row[j].v[i];
}
#endif

// `wanted` elements at p, of which only `left` exist: zeros stand for the others, in `space`.
template <class T>
inline const T* filled(const T* p, int left, int wanted, T* space) {
  if (left >= wanted) return p;
  for (int i = 0; i < wanted; ++i) space[i] = i < left ? p[i] : T{};
  return space;
}

// Columns of K that are transposed at a time: words of two bfloat16 become floats after it.
template <class Unit, class T>
constexpr int kKeyStep = 8 * kPack<Unit>;
#if defined(__AVX2__)
template <>
constexpr int kKeyStep<FloatUnit, bf16> = 16;

inline void store_widened(Units (&row)[8], float* out, int stride) {
  transpose(row);
  MILLRACE_UNROLL
  for (int i = 0; i < 8; ++i) {
    store_units(out + 2 * i * stride, _mm256_slli_epi32(row[i], 16));
    store_units(out + (2 * i + 1) * stride, _mm256_and_si256(row[i], _mm256_set1_epi32(-65536)));
  }
}
#endif

// Transposes eight K rows from column j on; Whole: they exist, and have that many columns.
template <class Unit, bool Whole, class T>
inline void pack_key_units(const T* const* k, int count, int j, int left,
                           typename Unit::Element* out) {
  constexpr int kWanted = kKeyStep<Unit, T>;
  Units rows[8];
  MILLRACE_UNROLL
  for (int i = 0; i < 8; ++i) {
    T space[kWanted];
    const T* row = Whole       ? k[i] + j
                   : i < count ? filled(k[i] + j, left, kWanted, space)
                               : filled(k[0], 0, kWanted, space);
    if constexpr (sizeof(T) == 2 && kWanted == 16)
      rows[i] = as_pairs(row);
    else
      rows[i] = as_floats(row);
  }
  if constexpr (kWanted > 8 * kPack<Unit>)
    store_widened(rows, out, kTileColumns);
  else
    store_transposed(rows, out, kTileColumns);
}

template <class T>
inline void ask_for(const T* row, int head_dim) {
  for (int j = 0; j < head_dim; j += static_cast<int>(64 / sizeof(T))) __builtin_prefetch(row + j, 0, 3);
}

// Transposes the K rows at k into panels, and asks for their V rows and for the K rows of the next
// `ahead` slots.
template <class Unit, class T>
void pack_keys(const T* const* k, std::int64_t v_offset, int count, int ahead, int head_dim,
               std::int64_t depth, typename Unit::Element* panels) {
  constexpr int kStep = kKeyStep<Unit, T>;
  const int end = static_cast<int>(round_up(count, kTileColumns));
  const int filled = static_cast<int>(round_up(head_dim, kStep)) / kPack<Unit>;
  for (int t = 0; t < end; t += 8) {
    for (int i = t; i < count && i < t + 8; ++i) ask_for(k[i] + v_offset, head_dim);
    for (int i = t; i < ahead && i < t + 8; ++i) ask_for(k[count + i], head_dim);
    typename Unit::Element* out =
        panels + t / kTileColumns * kTileColumns * depth + t % kTileColumns;
    for (int unit = filled; unit < units_of<Unit>(head_dim); ++unit)
      for (int i = 0; i < 8; ++i) out[unit * kTileColumns + i] = {};
    for (int j = 0; j < head_dim; j += kStep, out += kStep / kPack<Unit> * kTileColumns) {
      if (t + 8 <= count && j + kStep <= head_dim)
        pack_key_units<Unit, true>(k + t, 8, j, kStep, out);
      else
        pack_key_units<Unit, false>(k + smaller(t, count - 1), larger(count - t, 0), j,
                                    head_dim - j, out);
    }
  }
}

// Copies eight columns of V, of one row or of a pair.
template <class Unit, class T>
inline void pack_value_units(const T* v, const T* next, typename Unit::Element* out) {
  if constexpr (kPack<Unit> == 2)
    store_units(out, zipped(v, next));
  else
    store_units(out, as_floats(v));
}

// Whether a strip alone multiplies V where it lies: rows are read once, and copies would cost more.
template <class T>
inline bool reads_values(std::int64_t lanes, int head_dim) {
  return kPack<typename Packing<T>::Unit> == 1 && lanes <= kTileRows && head_dim % kTileColumns == 0;
}

// Copies the V rows behind k into panels of kTileColumns of their columns.
template <class Unit, class T>
void pack_values(const T* const* k, std::int64_t v_offset, int count, int head_dim,
                 typename Unit::Element* panels) {
  static constexpr T kNothing[8] = {};
  const int whole = head_dim / kTileColumns * kTileColumns;
  const int first_empty = (count + kPack<Unit> - 1) / kPack<Unit>;
  for (int j = 0; j < head_dim && first_empty < units_of<Unit>(count); j += kTileColumns) {
    typename Unit::Element* out = panels + j / kTileColumns * kPanel + first_empty * kTileColumns;
    for (int i = 0; i < (units_of<Unit>(count) - first_empty) * kTileColumns; ++i) out[i] = {};
  }
  for (int t = 0; t < count; t += kPack<Unit>) {
    typename Unit::Element* out = panels + t / kPack<Unit> * kTileColumns;
    const T* v = k[t] + v_offset;
    const bool paired = t + 1 < count;
    const T* next = k[paired ? t + 1 : t] + v_offset;
    int j = 0;
    if (kPack<Unit> == 1 || paired)
      for (; j < whole; j += kTileColumns, out += kPanel)
        MILLRACE_UNROLL
        for (int i = 0; i < kTileColumns; i += 8)
          pack_value_units<Unit>(v + j + i, next + j + i, out + i);
    for (; j < head_dim; j += kTileColumns, out += kPanel)
      for (int i = 0; i < kTileColumns; i += 8) {
        T space[8], next_space[8];
        const int left = larger(head_dim - j - i, 0);
        pack_value_units<Unit>(filled(v + j + i, left, 8, space),
                               paired ? filled(next + j + i, left, 8, next_space) : kNothing,
                               out + i);
      }
  }
}
