// Attention over few lanes (decode): dot products of q with K rows, weighted sums of V rows, both
// read where they lie. Included by kernels_impl.hpp after attention_impl.hpp.
//
// A task takes several kv heads and goes through K/V block by block, head after head within a
// block: nearly the order in which pages lie in memory. While it reads a block's K it asks for the
// same block's V, and while it reads V for the next block's K: K/V that no cache holds is on its
// way all the time.
//
// Two neighbouring vectors of a row make a pair. Its halves are its even and its odd elements in
// bfloat16, each a shift or a mask away, and its first and its last ones in float32. q and the sums
// are kept in halves.

constexpr int kBlock = 32;  // K/V slots between two updates of the running maximum
#if defined(__AVX512F__)
constexpr int kLaneTile = 4;  // lanes that share a pass over K or V in registers
#else
constexpr int kLaneTile = 3;
#endif
constexpr int kPair = 2 * Vec::N;
constexpr int kPairTile = 2;  // pairs of one output row held in registers

template <int Half>
inline Vec load_half(const float* p) {
  return load(p + Half * Vec::N);
}
template <int Half>
inline Vec load_half(const float* p, int count) {
  float part[kPair] = {};
  __builtin_memcpy(part, p, static_cast<unsigned>(count) * sizeof(float));
  return load(part + Half * Vec::N);
}

#if defined(__AVX512F__)
template <int Half>
inline Vec half_of(__m512i pair) {
  if constexpr (Half == 0) return {_mm512_castsi512_ps(_mm512_slli_epi32(pair, 16))};
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm512_castsi512_ps(_mm512_and_si512(pair, high))};
}
template <int Half>
inline Vec load_half(const bf16* p) {
  return half_of<Half>(_mm512_loadu_si512(p));
}
template <int Half>
inline Vec load_half(const bf16* p, int count) {
  return half_of<Half>(_mm512_maskz_loadu_epi16((1u << count) - 1u, p));
}
#else
#if defined(__AVX2__) && defined(__FMA__)
template <int Half>
inline Vec load_half(const bf16* p) {
  asm volatile("" : "+r"(p));  // kept from one half to the other, the pair would cost a register
  const __m256i pair = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  if constexpr (Half == 0) return {_mm256_castsi256_ps(_mm256_slli_epi32(pair, 16))};
  // Two shifts: a mask would take the register that the tile of V has left.
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_srli_epi32(pair, 16), 16))};
}
#else
template <int Half>
inline Vec load_half(const bf16* p) {
  Vec r;
  for (int i = 0; i < Vec::N; ++i) r.v[i] = to_float(p[2 * i + Half]);
  return r;
}
#endif
template <int Half>
inline Vec load_half(const bf16* p, int count) {
  bf16 part[kPair] = {};
  __builtin_memcpy(part, p, static_cast<unsigned>(count) * sizeof(bf16));
  return load_half<Half>(part);
}
#endif

// A row into halves and back, for whole pairs of T.
template <class T>
inline void halve(const float* row, std::int64_t dim, float* halves) {
  for (std::int64_t j = 0; j < dim; j += kPair)
    for (int i = 0; i < Vec::N; ++i) {
      halves[j + i] = row[sizeof(T) == 2 ? j + 2 * i : j + i];
      halves[j + Vec::N + i] = row[sizeof(T) == 2 ? j + 2 * i + 1 : j + Vec::N + i];
    }
}
template <class T>
inline void join_halves(const float* halves, std::int64_t dim, float* row) {
  for (std::int64_t j = 0; j < dim; j += kPair)
    for (int i = 0; i < Vec::N; ++i) {
      row[sizeof(T) == 2 ? j + 2 * i : j + i] = halves[j + i];
      row[sizeof(T) == 2 ? j + 2 * i + 1 : j + Vec::N + i] = halves[j + Vec::N + i];
    }
}

struct FewScratch {
  float* q;          // [lanes, dim] in halves
  float* o;          // [lanes, dim] in halves, sums of weight * v so far, of a span
  float* before;     // [lanes, dim] in halves, of the spans before
  float* p;          // [lanes, kBlock], scores, then weights
  float* maximum;    // [lanes]
  float* total;      // [lanes], sums of weights so far
  float* maximum_before;  // [lanes]
  float* total_before;    // [lanes]
  float* decay;      // [lanes]
  std::int64_t dim;  // head_dim, padded

  FewScratch(float* base, int lanes, int head_dim) : dim(padded(head_dim)) {
    q = base;
    o = q + lanes * dim;
    before = o + lanes * dim;
    p = before + lanes * dim;
    maximum = p + lanes * kBlock;
    total = maximum + lanes;
    maximum_before = total + lanes;
    total_before = maximum_before + lanes;
    decay = total_before + lanes;
  }
};

std::int64_t few_scratch(int lanes, int head_dim) {
  return lanes * (3 * padded(head_dim) + kBlock + 5);
}

inline int lane_tiles(int lanes) {
  return (lanes + kLaneTile - 1) / kLaneTile;
}

// Calls Body(first lane, run) for runs of at most kLaneTile lanes that cover them all.
template <class Body>
inline void for_lane_tiles(int lanes, const Body& body) {
  for (int lane = 0; lane < lanes;) {
    const int left = lanes - lane;
    const int run = left == 4 && kLaneTile == 3 ? 2 : left < kLaneTile ? left : kLaneTile;
    body(lane, run);
    lane += run;
  }
}

// Asks for the rows that are soon read, evenly spread over the steps of other work: more at a time
// than the first cache can wait for would hold that work up.
template <class T>
struct Asker {
  const T* const* rows;  // of the first head of the task
  std::int64_t offset;   // from there to this head's
  int head_dim;
  int left;   // rows
  int every;  // steps from one row to the next
  int wait = 1;

  void step() {
    if (--wait > 0 || left == 0) return;
    constexpr int line = 64 / sizeof(T);
    const T* row = *rows++ + offset;
    for (int j = 0; j < head_dim; j += line) __builtin_prefetch(row + j);
    --left;
    wait = every;
  }
};

// p[g][t] = q[g] . k[t] for G lanes and every slot of the block; of each `shares` groups of four
// slots, asks for the V rows of one, `share`.
template <class T, int G>
void score_lanes(const float* q, std::int64_t dim, const T* const* k, std::int64_t offset,
                 std::int64_t v_offset, int count, int head_dim, int share, int shares, float* p) {
  const int full = head_dim / kPair * kPair;
  const int rest = head_dim - full;
  for (int t = 0; t < count; t += 4) {
    const std::int64_t asked = t / 4 % shares == share ? v_offset : 0;
    const T* rows[4];
    MILLRACE_UNROLL
    for (int i = 0; i < 4; ++i) rows[i] = k[t + i < count ? t + i : count - 1] + offset;
    Vec sums[G][4];
    MILLRACE_UNROLL
    for (int g = 0; g < G; ++g)
      MILLRACE_UNROLL
      for (int i = 0; i < 4; ++i) sums[g][i] = zero();
    const auto step = [&](const float* queries, int column, auto key_of) {
      Vec query[G];
      MILLRACE_UNROLL
      for (int g = 0; g < G; ++g) query[g] = load(queries + g * dim);
      MILLRACE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const Vec key = key_of(rows[i] + column);
        MILLRACE_UNROLL
        for (int g = 0; g < G; ++g) sums[g][i] = fma(query[g], key, sums[g][i]);
      }
    };
    for (int j = 0; j < full; j += kPair) {
      MILLRACE_UNROLL
      for (int i = 0; i < 4; ++i)
        for (int line = 0; line < kPair; line += static_cast<int>(64 / sizeof(T)))
          __builtin_prefetch(rows[i] + asked + j + line);
      step(q + j, j, [](const T* from) { return load_half<0>(from); });
      step(q + j + Vec::N, j, [](const T* from) { return load_half<1>(from); });
    }
    if (rest) {
      step(q + full, full, [rest](const T* from) { return load_half<0>(from, rest); });
      step(q + full + Vec::N, full, [rest](const T* from) { return load_half<1>(from, rest); });
    }
    MILLRACE_UNROLL
    for (int g = 0; g < G; ++g)
      sum4(sums[g][0], sums[g][1], sums[g][2], sums[g][3], p + g * kBlock + t);
  }
}

// o[g] = decay[g] * o[g] + sum over t of p[g][t] * v[t], for D pairs of the row from `column`.
template <class T, int G, int D, bool Part>
void add_value_columns(float* o, std::int64_t dim, const T* const* v, std::int64_t offset,
                       int count, int column, int rest, const float* p, const float* decay,
                       Asker<T>& asker) {
  Vec sums[G][2 * D];
  MILLRACE_UNROLL
  for (int g = 0; g < G; ++g)
    MILLRACE_UNROLL
    for (int j = 0; j < 2 * D; ++j)
      sums[g][j] = mul(set1(decay[g]), load(o + g * dim + column + j * Vec::N));
  for (int t = 0; t < count; ++t) {
    const T* row = v[t] + offset + column;
    asker.step();
    Vec weights[G];
    MILLRACE_UNROLL
    for (int g = 0; g < G; ++g) weights[g] = set1(p[g * kBlock + t]);
    MILLRACE_UNROLL
    for (int j = 0; j < D; ++j) {
      const T* pair = row + j * kPair;
      const Vec even = Part ? load_half<0>(pair, rest) : load_half<0>(pair);
      MILLRACE_UNROLL
      for (int g = 0; g < G; ++g) sums[g][2 * j] = fma(weights[g], even, sums[g][2 * j]);
      const Vec odd = Part ? load_half<1>(pair, rest) : load_half<1>(pair);
      MILLRACE_UNROLL
      for (int g = 0; g < G; ++g) sums[g][2 * j + 1] = fma(weights[g], odd, sums[g][2 * j + 1]);
    }
  }
  MILLRACE_UNROLL
  for (int g = 0; g < G; ++g)
    MILLRACE_UNROLL
    for (int j = 0; j < 2 * D; ++j) store(o + g * dim + column + j * Vec::N, sums[g][j]);
}

inline int column_tiles(int head_dim) {
  const int pairs = head_dim / kPair;
  return pairs / kPairTile + pairs % kPairTile + (head_dim % kPair > 0);
}

template <class T, int G>
void add_values(float* o, std::int64_t dim, const T* const* v, std::int64_t offset, int count,
                int head_dim, const float* p, const float* decay, Asker<T>& asker) {
  const int full = head_dim / kPair * kPair;
  int column = 0;
  for (; column + kPairTile * kPair <= full; column += kPairTile * kPair)
    add_value_columns<T, G, kPairTile, false>(o, dim, v, offset, count, column, 0, p, decay, asker);
  for (; column < full; column += kPair)
    add_value_columns<T, G, 1, false>(o, dim, v, offset, count, column, 0, p, decay, asker);
  if (head_dim > full)
    add_value_columns<T, G, 1, true>(o, dim, v, offset, count, column, head_dim - full, p, decay,
                                     asker);
}

template <class T>
void few_block(const AttentionCall& c, const AttentionTask& task, const Scores& scores,
               const FewScratch& s, const Rows<T, 2 * kBlock>& rows, int ahead,
               const Positions<kBlock>& slots) {
  const int group = c.q_heads / c.kv_heads;
  const int lanes = task.rows * group;
  const int count = slots.count;
  const int tiles = lane_tiles(lanes);
  for (int head = 0; head < task.heads; ++head) {
    const std::int64_t offset = head * rows.head_stride;
    int tile = 0;
    for_lane_tiles(lanes, [&](int lane, int run) {
      const float* q = s.q + (head * lanes + lane) * s.dim;
      float* p = s.p + (head * lanes + lane) * kBlock;
      const auto score = [&](auto body) {
        body(q, s.dim, rows.k, offset, rows.v_offset, count, c.head_dim, tile, tiles, p);
      };
      switch (run) {
        case 1: score(score_lanes<T, 1>); break;
        case 2: score(score_lanes<T, 2>); break;
        case 3: score(score_lanes<T, 3>); break;
        default: score(score_lanes<T, kLaneTile>);
      }
      ++tile;
    });
  }
  const int end = static_cast<int>(round_up(count, Vec::N));
  for (int head = 0; head < task.heads; ++head) {
    const std::int64_t offset = head * rows.head_stride;
    for (int lane = head * lanes; lane < (head + 1) * lanes; ++lane) {
      float* p = s.p + lane * kBlock;
      if (scores.capped()) scores.cap(p, 0, end);
      const Reach reach = reach_of(c, task, lane % lanes / group);
      if (!slots.all_seen(reach)) slots.hide(p, 0, count, reach);
      for (int t = count; t < end; ++t) p[t] = kHidden;
      s.decay[lane] =
          update_softmax<float>(p, 0, end, scores.factor, s.maximum[lane], s.total[lane]);
    }
    Asker<T> asker = {rows.k + kBlock, offset, c.head_dim, ahead, tiles * column_tiles(c.head_dim)};
    for_lane_tiles(lanes, [&](int lane, int run) {
      float* o = s.o + (head * lanes + lane) * s.dim;
      const float* p = s.p + (head * lanes + lane) * kBlock;
      const auto add = [&](auto body) {
        body(o, s.dim, rows.k, offset + rows.v_offset, count, c.head_dim, p,
             s.decay + head * lanes + lane, asker);
      };
      switch (run) {
        case 1: add(add_values<T, 1>); break;
        case 2: add(add_values<T, 2>); break;
        case 3: add(add_values<T, 3>); break;
        default: add(add_values<T, kLaneTile>);
      }
    });
  }
}

// Sums over the slots [begin, end), at most to the end of begin's span.
template <class T>
void few_span(const AttentionCall& c, const AttentionTask& task, const Scores& scores,
              const FewScratch& s, Reach widest, int lanes, int begin, int end) {
  clear_sums(s.o, s.maximum, s.total, lanes, s.dim);
  Positions<kBlock> slots;
  for (; begin < end; begin += kBlock) {
    slots.read(task, begin, smaller(end - begin, kBlock));
    if (slots.all_hidden(widest)) continue;
    const int both = smaller(task.end - begin, slots.count + kBlock);
    const Rows<T, 2 * kBlock> rows(c, task, begin, begin + both);
    few_block<T>(c, task, scores, s, rows, both - slots.count, slots);
  }
}

template <class T>
void attend_few(const AttentionCall& c, const AttentionTask& task, float* base) {
  const int lanes = lanes_of(c, task);
  const FewScratch s(base, lanes, c.head_dim);
  const Scores scores(c);
  for (int lane = 0; lane < lanes; ++lane) {
    const LaneAt at(c, task, lane);
    const T* q = static_cast<const T*>(c.q) + at.row * c.q_stride_n + at.head * c.q_stride_h;
    float* row = s.o + lane * s.dim;
    for (int j = 0; j < c.head_dim; ++j) row[j] = scores.sign * to_float(q[j]);
    for (std::int64_t j = c.head_dim; j < s.dim; ++j) row[j] = 0.0f;
    halve<T>(row, s.dim, s.q + lane * s.dim);
  }
  Reach widest = reach_of(c, task, 0);
  for (int row = 1; row < task.rows; ++row) {
    const Reach reach = reach_of(c, task, row);
    widest = {smaller(widest.low, reach.low), larger(widest.high, reach.high)};
  }
  const Sums before{s.before, s.maximum_before, s.total_before};
  const Sums all = sum_spans(task, {s.o, s.maximum, s.total}, before, lanes, s.dim,
                             [&](int begin, int end) {
                               few_span<T>(c, task, scores, s, widest, lanes, begin, end);
                             });
  for (int lane = 0; lane < lanes; ++lane)
    join_halves<T>(all.o + lane * s.dim, s.dim, s.q + lane * s.dim);
  finish_task<T>(c, task, s.q, all.maximum, all.total);
}
