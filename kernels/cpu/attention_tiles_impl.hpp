// Blocks of K and V are packed once for all lanes of a task, then scores = q K^T and o += weights V are
// multiplied in tiles. Included by kernels_impl.hpp after attention_pack_impl.hpp.

constexpr int kStrip = 4 * kTileRows;  // lanes whose scores are kept, and should stay in L1
// No powers of two: L1 has few ways.
constexpr std::int64_t kScoreStride = kTileBlock + 16;

struct TileScratch {
  std::int64_t lanes, room, dim;  // lanes that there is room for; floats or units of a row
  float* q;                       // [room, dim] units
  float* o;                       // [room, dim], sums of weight * v so far, of a span
  float* before;                  // [lanes, dim], of the spans before
  float* scores;                   // [kStrip, kScoreStride], then weights
  float* keys;                     // [panels of slots, dim, kTileColumns] units
  float* values;                   // [panels of dim, kPanel] units
  float* maximum;                  // [lanes]
  float* total;                    // [lanes], sums of weights so far
  float* maximum_before;           // [lanes]
  float* total_before;             // [lanes]
  Reach* reach;                    // [lanes]

  TileScratch(float* base, int lanes_, int head_dim)
      : lanes(lanes_), room(round_up(lanes_, 16)), dim(padded(head_dim)) {
    q = base;
    o = q + room * dim;
    before = o + room * dim;
    scores = before + lanes * dim;
    keys = scores + kStrip * kScoreStride;
    values = keys + kTileBlock * dim;
    maximum = values + kPanel * round_up(head_dim, kTileColumns) / kTileColumns;
    total = maximum + lanes;
    maximum_before = total + lanes;
    total_before = maximum_before + lanes;
    reach = reinterpret_cast<Reach*>(total_before + lanes);
  }
  static std::int64_t floats(int lanes, int head_dim) {
    const std::int64_t dim = padded(head_dim);
    return round_up(lanes, 16) * 3 * dim + lanes * 6 + kStrip * kScoreStride +
           (2 * kTileBlock + 1) * dim;
  }
};

// c[rows][kTileColumns] = (Add ? c : 0) + a[rows][k] * b[k][kTileColumns] for rows <= R.
template <class Unit, bool Add, int R = kTileRows, class B>
inline void multiply_rows(int rows, const typename Unit::Element* a, std::int64_t a_stride,
                          const B* b, std::int64_t b_stride, std::int64_t k,
                          float* c, std::int64_t c_stride) {
  if (rows >= R)
    multiply_tile<Unit, R, Add>(a, a_stride, b, b_stride, k, c, c_stride);
  else if constexpr (R > 1)
    multiply_rows<Unit, Add, R - 1>(rows, a, a_stride, b, b_stride, k, c, c_stride);
}

// The same for any number of rows. k is a multiple of kUnits, c has room for whole tiles.
template <class Unit, bool Add>
inline void multiply_strip(int rows, const typename Unit::Element* a, std::int64_t a_stride,
                           const typename Unit::Element* b, std::int64_t k, float* c,
                           std::int64_t c_stride) {
#if defined(__AMX_BF16__)
  if constexpr (kUnits<Unit> > 1) {
    for (int row = 0; row < rows; row += 2 * kAmxRows) {
      const bool wide = rows - row > kAmxRows;
      (wide ? amx_multiply<2, Add> : amx_multiply<1, Add>)(a + row * a_stride, a_stride * 4, b,
                                                          kTileColumns * 4, k, c + row * c_stride,
                                                          c_stride);
    }
    return;
  }
#endif
  for (int row = 0; row < rows; row += kTileRows)
    multiply_rows<Unit, Add>(rows - row, a + row * a_stride, a_stride, b, kTileColumns, k,
                             c + row * c_stride, c_stride);
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

// o += weights V over the slots [from, to), from where V lies.
template <class T>
inline void add_values(const AttentionCall& c, const TileScratch& s,
                       const Rows<T, 2 * kTileBlock>& rows, int lanes, int from, int to) {
  for (int next; from < to; from = next) {
    for (next = from + 1; next < to && rows.k[next] == rows.k[next - 1] + c.head_dim;) ++next;
    for (int j = 0; j < c.head_dim; j += kTileColumns)
      multiply_rows<FloatUnit, true>(lanes, s.scores + from, kScoreStride,
                                     rows.k[from] + rows.v_offset + j, c.head_dim, next - from,
                                     s.o + j, s.dim);
  }
}

// Adds a packed block to the lanes [begin, end), at most kStrip of them.
template <class T>
void attend_strip(const AttentionCall& c, const Scores& scores, const TileScratch& s, int begin,
                  int end, const Positions<kTileBlock>& slots,
                  const Rows<T, 2 * kTileBlock>& rows) {
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
  const int to = static_cast<int>(round_up(span.last, larger(Vec::N, kUnits<Unit> * kPack<Unit>)));
  const int lanes = end - begin;

  const Element* q = reinterpret_cast<const Element*>(s.q) + begin * s.dim;
  for (int t = from; t < to; t += kTileColumns)
    multiply_strip<Unit, false>(lanes, q, s.dim,
                                reinterpret_cast<const Element*>(s.keys) + t * s.dim,
                                units_of<Unit>(c.head_dim), s.scores + t, kScoreStride);

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

  if constexpr (kPack<Unit> == 1)
    if (reads_values<T>(s.lanes, c.head_dim)) return add_values(c, s, rows, lanes, from, span.last);
  const int first_unit = from / kPack<Unit>;
  // Weights of type bf16 lie at the start of their row of scores.
  const Element* weights = reinterpret_cast<const Element*>(s.scores) + first_unit;
  for (int j = 0; j < c.head_dim; j += kTileColumns)
    multiply_strip<Unit, true>(
        lanes, weights, kScoreStride,
        reinterpret_cast<const Element*>(s.values) + j / kTileColumns * kPanel +
            first_unit * kTileColumns,
        units_of<Unit>(span.last - from), s.o + begin * s.dim + j, s.dim);
}

template <class T>
void start_lanes(const AttentionCall& c, const AttentionTask& task, const Scores& scores,
                 const TileScratch& s) {
  constexpr int pack = kPack<typename Packing<T>::Unit>;
  using Weight = typename Packing<T>::Weight;
  const int group = c.q_heads / c.kv_heads;
  for (int lane = 0; lane < s.lanes; ++lane) {
    const LaneAt at(c, task, lane);
    const T* q = static_cast<const T*>(c.q) + at.row * c.q_stride_n + at.head * c.q_stride_h;
    Weight* to = reinterpret_cast<Weight*>(s.q + lane * s.dim);
    const int width = units_of<typename Packing<T>::Unit>(c.head_dim) * pack;
    for (int j = 0; j < width; ++j)
      assign(to + j, j < c.head_dim ? scores.sign * to_float(q[j]) : 0.0f);
    s.reach[lane] = reach_of(c, task, lane / group);
  }
}

// Sums over the slots [begin, end), at most to the end of begin's span.
template <class T>
void attend_span(const AttentionCall& c, const AttentionTask& task, const Scores& scores,
                 const TileScratch& s, Reach widest, int begin, int end) {
  using Unit = typename Packing<T>::Unit;
  using Element = typename Unit::Element;
  clear_sums(s.o, s.maximum, s.total, s.lanes, s.dim);
  Positions<kTileBlock> slots;
  for (int next; begin < end; begin = next) {
    next = smaller((begin / kTileBlock + 1) * kTileBlock, end);
    const int count = next - begin;
    slots.read(task, begin, count);
    if (slots.all_hidden(widest)) continue;
    const int ahead = smaller(task.end - next, count);
    const Rows<T, 2 * kTileBlock> rows(c, task, begin, next + ahead);
    pack_keys<Unit>(rows.k, rows.v_offset, count, ahead, c.head_dim, s.dim,
                    reinterpret_cast<Element*>(s.keys));
    if (!reads_values<T>(s.lanes, c.head_dim))
      pack_values<Unit>(rows.k, rows.v_offset, count, c.head_dim,
                        reinterpret_cast<Element*>(s.values));
    const int lanes = static_cast<int>(s.lanes);
    for (int lane = 0; lane < lanes; lane += kStrip)
      attend_strip<T>(c, scores, s, lane, smaller(lane + kStrip, lanes), slots, rows);
  }
}

template <class T>
void attend(const AttentionCall& c, const AttentionTask& task, float* base) {
#if defined(__AMX_BF16__)
  const AmxTiles tiles;
#endif
  const TileScratch s(base, lanes_of(c, task), c.head_dim);
  const Scores scores(c);
  start_lanes<T>(c, task, scores, s);
  Reach widest = s.reach[0];
  for (int lane = 1; lane < s.lanes; ++lane)
    widest = {smaller(widest.low, s.reach[lane].low), larger(widest.high, s.reach[lane].high)};
  const Sums before{s.before, s.maximum_before, s.total_before};
  const Sums all = sum_spans(task, {s.o, s.maximum, s.total}, before, s.lanes, s.dim,
                             [&](int begin, int end) {
                               attend_span<T>(c, task, scores, s, widest, begin, end);
                             });
  finish_task<T>(c, task, all.o, all.maximum, all.total);
}

constexpr AttentionKernels kAttention = {
    {TileScratch::floats, few_scratch},
    attention_partial,
    {{attend<float>, attend<bf16>}, {attend_few<float>, attend_few<bf16>}},
    {attention_merge<float>, attention_merge<bf16>},
    {{attention_join<float, float>, attention_join<float, bf16>},
     {attention_join<bf16, float>, attention_join<bf16, bf16>}},
};
