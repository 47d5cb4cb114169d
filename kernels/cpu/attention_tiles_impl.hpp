// Attention over many lanes (prefill): blocks of K and V are packed once for all lanes of a task,
// then scores = q K^T and o += weights V are multiplied by register tiles (tile.hpp). Included by
// kernels_impl.hpp after attention_few_impl.hpp.
//
// A unit of tile.hpp holds kPack neighbours of the dimension that is summed over: of d in q K^T, of
// slots in weights V.

constexpr int kStrip = 4 * kTileRows;  // lanes whose scores are kept, and should stay in L1
// No powers of two: L1 has few ways.
constexpr std::int64_t kScoreStride = kTileBlock + 16;
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
#if defined(__AVX512BF16__)
template <>
constexpr int kPack<PairUnit> = 2;
#endif

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

struct TileScratch {
  std::int64_t lanes, dim, depth;  // dim: floats of an o row; depth: units of a q row, padded
  float* q;                        // [lanes, depth] units
  float* o;                        // [lanes, dim], sums of weight * v so far
  float* scores;                   // [kStrip, kScoreStride], then weights
  float* keys;                     // [panels of slots, depth, kTileColumns] units
  float* values;                   // [panels of dim, kPanel] units
  float* maximum;                  // [lanes]
  float* total;                    // [lanes], sums of weights so far
  Reach* reach;                    // [lanes]

  TileScratch(float* base, int lanes_, int head_dim)
      : lanes(lanes_), dim(padded(head_dim)), depth(round_up(head_dim, 8)) {
    q = base;
    o = q + lanes * depth;
    scores = o + lanes * dim;
    keys = scores + kStrip * kScoreStride;
    values = keys + kTileBlock * depth;
    maximum = values + kPanel * round_up(head_dim, kTileColumns) / kTileColumns;
    total = maximum + lanes;
    reach = reinterpret_cast<Reach*>(total + lanes);
  }
};

std::int64_t tile_scratch(int lanes, int head_dim) {
  const std::int64_t row = padded(head_dim) + round_up(head_dim, 8);
  return lanes * (row + 4) + kStrip * kScoreStride + (kTileBlock + 1) * row;
}

// Transposes eight K rows from column j on; Whole: they exist, and have that many columns.
template <class Unit, bool Whole, class T>
inline void pack_key_units(const T* const* k, int count, int j, int left,
                           typename Unit::Element* out) {
  constexpr int kWanted = 8 * kPack<Unit>;
  Units rows[8];
  MILLRACE_UNROLL
  for (int i = 0; i < 8; ++i) {
    T space[kWanted];
    const T* row = Whole       ? k[i] + j
                   : i < count ? filled(k[i] + j, left, kWanted, space)
                               : filled(k[0], 0, kWanted, space);
    if constexpr (kPack<Unit> == 2)
      rows[i] = as_pairs(row);
    else
      rows[i] = as_floats(row);
  }
  store_transposed(rows, out, kTileColumns);
}

// Transposes the K rows at k into panels.
template <class Unit, class T>
void pack_keys(const T* const* k, int count, int head_dim, std::int64_t depth,
               typename Unit::Element* panels) {
  constexpr int kStep = 8 * kPack<Unit>;
  const int end = static_cast<int>(round_up(count, kTileColumns));
  for (int t = 0; t < end; t += 8) {
    typename Unit::Element* out =
        panels + t / kTileColumns * kTileColumns * depth + t % kTileColumns;
    for (int j = 0; j < head_dim; j += kStep, out += 8 * kTileColumns) {
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

// Copies the V rows behind k into panels of kTileColumns of their columns.
template <class Unit, class T>
void pack_values(const T* const* k, std::int64_t v_offset, int count, int head_dim,
                 typename Unit::Element* panels) {
  static constexpr T kNothing[8] = {};
  const int whole = head_dim / kTileColumns * kTileColumns;
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

// c[rows][kTileColumns] = (Add ? c : 0) + a[rows][k] * b[k][kTileColumns] for rows <= R.
template <class Unit, bool Add, int R = kTileRows>
inline void multiply_rows(int rows, const typename Unit::Element* a, std::int64_t a_stride,
                          const typename Unit::Element* b, std::int64_t k, float* c,
                          std::int64_t c_stride) {
  if (rows >= R)
    multiply_tile<Unit, R, Add>(a, a_stride, b, kTileColumns, k, c, c_stride);
  else if constexpr (R > 1)
    multiply_rows<Unit, Add, R - 1>(rows, a, a_stride, b, k, c, c_stride);
}

// The slots of a block that some row of a strip sees lie in [first, last).
struct Span {
  int first, last;
};

inline Span span_of(const Positions<kTileBlock>& slots, Reach widest) {
  int first = 0, last = slots.count;
  while (last > 0 && (slots.at[last - 1] > widest.high || slots.at[last - 1] < widest.low)) --last;
  while (first < last && (slots.at[first] > widest.high || slots.at[first] < widest.low)) ++first;
  return {first, last};
}

// Adds a packed block to the lanes [begin, end), at most kStrip of them.
template <class T>
void attend_strip(const AttentionCall& c, const Scores& scores, const TileScratch& s, int begin,
                  int end, const Positions<kTileBlock>& slots) {
  using Unit = typename Packing<T>::Unit;
  using Element = typename Unit::Element;
  Reach widest = s.reach[begin], narrowest = s.reach[begin];
  for (int lane = begin + 1; lane < end; ++lane) {
    const Reach reach = s.reach[lane];
    widest = {smaller(widest.low, reach.low), larger(widest.high, reach.high)};
    narrowest = {larger(narrowest.low, reach.low), smaller(narrowest.high, reach.high)};
  }
  if (slots.all_hidden(widest)) return;
  const bool all_seen = slots.all_seen(narrowest);
  const Span span = all_seen ? Span{0, slots.count} : span_of(slots, widest);
  if (span.first == span.last) return;
  const int from = span.first / kTileColumns * kTileColumns;
  const int to = static_cast<int>(round_up(span.last, Vec::N));
  const int lanes = end - begin;
  const int depth = (c.head_dim + kPack<Unit> - 1) / kPack<Unit>;

  const Element* q = reinterpret_cast<const Element*>(s.q) + begin * s.depth;
  for (int t = from; t < to; t += kTileColumns)
    for (int lane = 0; lane < lanes; lane += kTileRows)
      multiply_rows<Unit, false>(lanes - lane, q + lane * s.depth, s.depth,
                                 reinterpret_cast<const Element*>(s.keys) + t * s.depth, depth,
                                 s.scores + lane * kScoreStride + t, kScoreStride);

  for (int lane = 0; lane < lanes; ++lane) {
    float* row = s.scores + lane * kScoreStride;
    if (scores.capped()) scores.cap(row, from, to);
    if (!all_seen) slots.hide(row, from, span.last, s.reach[begin + lane]);
    for (int t = span.last; t < to; ++t) row[t] = kHidden;
    const float decay = update_softmax<typename Packing<T>::Weight>(
        row, from, to, scores.factor, s.maximum[begin + lane], s.total[begin + lane]);
    if (decay == 1.0f) continue;
    float* o = s.o + (begin + lane) * s.dim;
    for (std::int64_t j = 0; j < s.dim; j += Vec::N) store(o + j, mul(load(o + j), set1(decay)));
  }

  const int first_unit = from / kPack<Unit>;
  const int units = (span.last - from + kPack<Unit> - 1) / kPack<Unit>;
  // Weights of type bf16 lie at the start of their row of scores.
  const Element* weights = reinterpret_cast<const Element*>(s.scores) + first_unit;
  for (int j = 0; j < c.head_dim; j += kTileColumns)
    for (int lane = 0; lane < lanes; lane += kTileRows)
      multiply_rows<Unit, true>(
          lanes - lane, weights + lane * kScoreStride, kScoreStride,
          reinterpret_cast<const Element*>(s.values) + j / kTileColumns * kPanel +
              first_unit * kTileColumns,
          units, s.o + (begin + lane) * s.dim + j, s.dim);
}

// Puts q into units and clears the sums.
template <class T>
void start_lanes(const AttentionCall& c, const AttentionTask& task, const Scores& scores,
                 const TileScratch& s) {
  constexpr int pack = kPack<typename Packing<T>::Unit>;
  using Weight = typename Packing<T>::Weight;
  const int group = c.q_heads / c.kv_heads;
  for (int lane = 0; lane < s.lanes; ++lane) {
    const LaneAt at(c, task, lane);
    const T* q = static_cast<const T*>(c.q) + at.row * c.q_stride_n + at.head * c.q_stride_h;
    Weight* to = reinterpret_cast<Weight*>(s.q + lane * s.depth);
    for (int j = 0; j < s.depth * pack; ++j)
      assign(to + j, j < c.head_dim ? scores.sign * to_float(q[j]) : 0.0f);
    for (std::int64_t j = 0; j < s.dim; ++j) s.o[lane * s.dim + j] = 0.0f;
    s.maximum[lane] = kHidden;
    s.total[lane] = 0.0f;
    s.reach[lane] = reach_of(c, task, lane / group);
  }
}

template <class T>
void attend_tiles(const AttentionCall& c, const AttentionTask& task, float* base) {
  using Unit = typename Packing<T>::Unit;
  using Element = typename Unit::Element;
  const int lanes = lanes_of(c, task);
  const TileScratch s(base, lanes, c.head_dim);
  const Scores scores(c);
  start_lanes<T>(c, task, scores, s);
  Reach widest = s.reach[0];
  for (int lane = 1; lane < lanes; ++lane)
    widest = {smaller(widest.low, s.reach[lane].low), larger(widest.high, s.reach[lane].high)};
  Positions<kTileBlock> slots;
  for (int begin = task.begin; begin < task.end;) {
    const int end = smaller((begin / kTileBlock + 1) * kTileBlock, task.end);
    slots.read(task, begin, end - begin);
    if (!slots.all_hidden(widest)) {
      const Rows<T, kTileBlock> rows(c, task, begin, end);
      pack_keys<Unit>(rows.k, end - begin, c.head_dim, s.depth, reinterpret_cast<Element*>(s.keys));
      pack_values<Unit>(rows.k, rows.v_offset, end - begin, c.head_dim,
                        reinterpret_cast<Element*>(s.values));
      for (int lane = 0; lane < lanes; lane += kStrip)
        attend_strip<T>(c, scores, s, lane, smaller(lane + kStrip, lanes), slots);
    }
    begin = end;
  }
  finish_task<T>(c, task, s.o, s.maximum, s.total);
}

constexpr AttentionKernels kAttention = {
    {few_scratch, tile_scratch},
    attention_partial,
    {{attend_few<float>, attend_few<bf16>}, {attend_tiles<float>, attend_tiles<bf16>}},
    {attention_merge<float>, attention_merge<bf16>},
    {{attention_join<float, float>, attention_join<float, bf16>},
     {attention_join<bf16, float>, attention_join<bf16, bf16>}},
};
