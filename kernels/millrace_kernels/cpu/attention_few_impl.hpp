// Attention over few lanes (decode): dot products of q with K rows, weighted sums of V rows, both
// read where they lie. Included by kernels_impl.hpp after attention_impl.hpp.

constexpr int kBlock = 64;  // K/V slots between two updates of the running maximum
#if defined(__AVX512F__)
constexpr int kLaneTile = 4;  // lanes that share a pass over K or V in registers
#else
constexpr int kLaneTile = 3;
#endif
constexpr int kDimTile = 4;  // vectors of one output row held in registers

struct FewScratch {
  float* q;          // [lanes, dim]
  float* o;          // [lanes, dim], sums of weight * v so far
  float* p;          // [lanes, kBlock], scores, then weights
  float* maximum;    // [lanes]
  float* total;      // [lanes], sums of weights so far
  float* decay;      // [lanes]
  std::int64_t dim;  // head_dim, padded

  FewScratch(float* base, int lanes, int head_dim) : dim(padded(head_dim)) {
    q = base;
    o = q + lanes * dim;
    p = o + lanes * dim;
    maximum = p + lanes * kBlock;
    total = maximum + lanes;
    decay = total + lanes;
  }
};

std::int64_t few_scratch(int lanes, int head_dim) {
  return lanes * (2 * padded(head_dim) + kBlock + 3);
}

// Calls Body<G>(first lane) for runs of G <= kLaneTile lanes that cover them all.
template <class Body>
inline void for_lane_tiles(int lanes, const Body& body) {
  for (int lane = 0; lane < lanes;) {
    const int left = lanes - lane;
    const int run = left == 4 && kLaneTile == 3 ? 2 : left < kLaneTile ? left : kLaneTile;
    body(lane, run);
    lane += run;
  }
}

// Asks for a row that is soon read: the machine's own prefetching ends where a page of K/V does.
template <class T>
inline void prefetch_row(const T* row, int head_dim) {
  for (int j = 0; j < head_dim; j += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(row + j);
}

// p[g][t] = q[g] . k[t] for G lanes and every slot of the block; asks for V meanwhile.
template <class T, int G>
void score_lanes(const float* q, std::int64_t dim, const T* const* k, std::int64_t v_offset,
                 int count, int head_dim, float* p) {
  const int full = head_dim / Vec::N;
  const int rest = head_dim % Vec::N;
  for (int t = 0; t < count; t += 4) {
    const T* rows[4];
    MILLRACE_UNROLL
    for (int i = 0; i < 4; ++i) rows[i] = k[t + i < count ? t + i : count - 1];
    for (int i = 0; i < 4; ++i) prefetch_row(rows[i] + v_offset, head_dim);
    Vec sums[G][4];
    MILLRACE_UNROLL
    for (int g = 0; g < G; ++g)
      MILLRACE_UNROLL
      for (int i = 0; i < 4; ++i) sums[g][i] = zero();
    const auto step = [&](int column, auto key_of) {
      Vec query[G];
      MILLRACE_UNROLL
      for (int g = 0; g < G; ++g) query[g] = load(q + g * dim + column);
      MILLRACE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const Vec key = key_of(rows[i] + column);
        MILLRACE_UNROLL
        for (int g = 0; g < G; ++g) sums[g][i] = fma(query[g], key, sums[g][i]);
      }
    };
    for (int j = 0; j < full; ++j) step(j * Vec::N, [](const T* from) { return load(from); });
    if (rest) step(full * Vec::N, [rest](const T* from) { return load_part(from, rest); });
    MILLRACE_UNROLL
    for (int g = 0; g < G; ++g)
      sum4(sums[g][0], sums[g][1], sums[g][2], sums[g][3], p + g * kBlock + t);
  }
}

// o[g] = decay[g] * o[g] + sum over t of p[g][t] * v[t], for D vectors of the row from `column`;
// asks for the next block's first `ahead` rows of K, of `asked` columns, meanwhile.
template <class T, int G, int D, bool Part>
void add_value_columns(float* o, std::int64_t dim, const T* const* k, std::int64_t v_offset,
                       int count, int column, int rest, const float* p, const float* decay,
                       int ahead = 0, int asked = 0) {
  Vec sums[G][D];
  MILLRACE_UNROLL
  for (int g = 0; g < G; ++g)
    MILLRACE_UNROLL
    for (int j = 0; j < D; ++j)
      sums[g][j] = mul(set1(decay[g]), load(o + g * dim + column + j * Vec::N));
  for (int t = 0; t < count; ++t) {
    const T* v = k[t] + v_offset + column;
    if (t < ahead) prefetch_row(k[t + kBlock], asked);
    Vec weights[G];
    MILLRACE_UNROLL
    for (int g = 0; g < G; ++g) weights[g] = set1(p[g * kBlock + t]);
    MILLRACE_UNROLL
    for (int j = 0; j < D; ++j) {
      const Vec value = Part ? load_part(v, rest) : load(v + j * Vec::N);
      MILLRACE_UNROLL
      for (int g = 0; g < G; ++g) sums[g][j] = fma(weights[g], value, sums[g][j]);
    }
  }
  MILLRACE_UNROLL
  for (int g = 0; g < G; ++g)
    MILLRACE_UNROLL
    for (int j = 0; j < D; ++j) store(o + g * dim + column + j * Vec::N, sums[g][j]);
}

template <class T, int G>
void add_values(float* o, std::int64_t dim, const T* const* k, std::int64_t v_offset, int count,
                int head_dim, const float* p, const float* decay, int ahead) {
  const int full = head_dim / Vec::N * Vec::N;
  int column = 0;
  for (; column + kDimTile * Vec::N <= full; column += kDimTile * Vec::N)
    add_value_columns<T, G, kDimTile, false>(o, dim, k, v_offset, count, column, 0, p, decay,
                                             column == 0 ? ahead : 0, head_dim);
  for (; column < full; column += Vec::N)
    add_value_columns<T, G, 1, false>(o, dim, k, v_offset, count, column, 0, p, decay);
  if (head_dim > full)
    add_value_columns<T, G, 1, true>(o, dim, k, v_offset, count, column, head_dim - full, p,
                                     decay);
}

template <class T>
void few_block(const AttentionCall& c, const AttentionTask& task, const Scores& scores,
               const FewScratch& s, const T* const* k, std::int64_t v_offset, int ahead,
               const Positions<kBlock>& slots) {
  const int group = c.q_heads / c.kv_heads;
  const int lanes = task.rows * group;
  const int count = slots.count;
  for_lane_tiles(lanes, [&](int lane, int run) {
    const float* q = s.q + lane * s.dim;
    float* p = s.p + lane * kBlock;
    switch (run) {
      case 1: return score_lanes<T, 1>(q, s.dim, k, v_offset, count, c.head_dim, p);
      case 2: return score_lanes<T, 2>(q, s.dim, k, v_offset, count, c.head_dim, p);
      case 3: return score_lanes<T, 3>(q, s.dim, k, v_offset, count, c.head_dim, p);
      default: return score_lanes<T, kLaneTile>(q, s.dim, k, v_offset, count, c.head_dim, p);
    }
  });
  const int end = static_cast<int>(round_up(count, Vec::N));
  for (int lane = 0; lane < lanes; ++lane) {
    float* p = s.p + lane * kBlock;
    if (scores.capped()) scores.cap(p, 0, end);
    const Reach reach = reach_of(c, task, lane / group);
    if (!slots.all_seen(reach)) slots.hide(p, 0, count, reach);
    for (int t = count; t < end; ++t) p[t] = kHidden;
    s.decay[lane] =
        update_softmax<float>(p, 0, end, scores.factor, s.maximum[lane], s.total[lane]);
  }
  for_lane_tiles(lanes, [&](int lane, int run) {
    float* o = s.o + lane * s.dim;
    const float* p = s.p + lane * kBlock;
    const float* r = s.decay + lane;
    const int next = lane == 0 ? ahead : 0;
    switch (run) {
      case 1: return add_values<T, 1>(o, s.dim, k, v_offset, count, c.head_dim, p, r, next);
      case 2: return add_values<T, 2>(o, s.dim, k, v_offset, count, c.head_dim, p, r, next);
      case 3: return add_values<T, 3>(o, s.dim, k, v_offset, count, c.head_dim, p, r, next);
      default: return add_values<T, kLaneTile>(o, s.dim, k, v_offset, count, c.head_dim, p, r, next);
    }
  });
}

template <class T>
void attend_few(const AttentionCall& c, const AttentionTask& task, float* base) {
  const int group = c.q_heads / c.kv_heads;
  const int lanes = task.rows * group;
  const FewScratch s(base, lanes, c.head_dim);
  const Scores scores(c);
  for (int lane = 0; lane < lanes; ++lane) {
    const std::int64_t row = task.first_row + lane / group;
    const std::int64_t head = task.kv_head * group + lane % group;
    const T* q = static_cast<const T*>(c.q) + row * c.q_stride_n + head * c.q_stride_h;
    for (std::int64_t j = 0; j < s.dim; ++j) {
      s.q[lane * s.dim + j] = j < c.head_dim ? scores.sign * to_float(q[j]) : 0.0f;
      s.o[lane * s.dim + j] = 0.0f;
    }
    s.maximum[lane] = kHidden;
    s.total[lane] = 0.0f;
  }
  const Rows<T, kSplit> rows(c, task, task.begin, task.end);
  Positions<kBlock> slots;
  Reach widest = reach_of(c, task, 0);
  for (int row = 1; row < task.rows; ++row) {
    const Reach reach = reach_of(c, task, row);
    widest = {smaller(widest.low, reach.low), larger(widest.high, reach.high)};
  }
  for (int begin = task.begin; begin < task.end; begin += kBlock) {
    slots.read(task, begin, smaller(task.end - begin, kBlock));
    if (slots.all_hidden(widest)) continue;
    const int ahead = larger(smaller(task.end - begin - kBlock, kBlock), 0);
    few_block<T>(c, task, scores, s, rows.k + (begin - task.begin), rows.v_offset, ahead, slots);
  }
  finish_task<T>(c, task, lanes, s.o, s.maximum, s.total);
}
