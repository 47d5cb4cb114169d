// Paged attention. Included by kernels_impl.hpp, after simd.hpp and tile.hpp.

constexpr int kBlock = 64;  // K/V positions between two updates of the running maximum
#if defined(__AVX512F__)
constexpr int kDimTile = 4;  // vectors of one output row held in registers
constexpr int kLaneTile = 4;
#else
constexpr int kDimTile = 2;
constexpr int kLaneTile = 2;
#endif

struct Scratch {
  float* q;         // [lanes, dim]
  float* o;         // [lanes, dim], sums of p * v so far
  float* p;         // [lanes, kBlock], scores, then probabilities
  float* maximum;   // [lanes]
  float* total;     // [lanes], sums of p so far
  float* rescale;   // [lanes]
  std::int64_t dim;  // head_dim, padded

  Scratch(float* base, int lanes, int head_dim) : dim(round_up(head_dim, 16)) {
    q = base;
    o = q + lanes * dim;
    p = o + lanes * dim;
    maximum = p + lanes * kBlock;
    total = maximum + lanes;
    rescale = total + lanes;
  }
};

std::int64_t attention_scratch(int lanes, int head_dim) {
  return lanes * (2 * round_up(head_dim, 16) + kBlock + 3);
}

std::int64_t attention_partial(int lanes, int head_dim) {
  return lanes * (round_up(head_dim, 16) + 2);
}

// p[g][t] = q[g] . k[t] for G lanes and every position of the block.
template <class T, int G>
void score_lanes(const float* q, std::int64_t dim, const T* const* k, int count, int head_dim,
                 float* p) {
  const int full = head_dim / Vec::N;
  const int rest = head_dim % Vec::N;
  for (int t = 0; t < count; t += 4) {
    const T* rows[4];
    MILLRACE_UNROLL
    for (int i = 0; i < 4; ++i) rows[i] = k[t + i < count ? t + i : count - 1];
    Vec sums[G][4];
    MILLRACE_UNROLL
    for (int g = 0; g < G; ++g)
      MILLRACE_UNROLL
      for (int i = 0; i < 4; ++i) sums[g][i] = zero();
    for (int j = 0; j < full; ++j) {
      Vec keys[4];
      MILLRACE_UNROLL
      for (int i = 0; i < 4; ++i) keys[i] = load(rows[i] + j * Vec::N);
      MILLRACE_UNROLL
      for (int g = 0; g < G; ++g) {
        const Vec query = load(q + g * dim + j * Vec::N);
        MILLRACE_UNROLL
        for (int i = 0; i < 4; ++i) sums[g][i] = fma(query, keys[i], sums[g][i]);
      }
    }
    if (rest) {
      MILLRACE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const Vec key = load_part(rows[i] + full * Vec::N, rest);
        MILLRACE_UNROLL
        for (int g = 0; g < G; ++g)
          sums[g][i] = fma(load(q + g * dim + full * Vec::N), key, sums[g][i]);
      }
    }
    MILLRACE_UNROLL
    for (int g = 0; g < G; ++g)
      sum4(sums[g][0], sums[g][1], sums[g][2], sums[g][3], p + g * kBlock + t);
  }
}

// o[g] = rescale[g] * o[g] + sum over t of p[g][t] * v[t], for D vectors of the row from `column`.
template <class T, int G, int D, bool Part>
void add_value_columns(float* o, std::int64_t dim, const T* const* v, int count, int column,
                       int rest, const float* p, const float* rescale) {
  Vec sums[G][D];
  MILLRACE_UNROLL
  for (int g = 0; g < G; ++g)
    MILLRACE_UNROLL
    for (int j = 0; j < D; ++j)
      sums[g][j] = mul(set1(rescale[g]), load(o + g * dim + column + j * Vec::N));
  for (int t = 0; t < count; ++t) {
    Vec values[D];
    MILLRACE_UNROLL
    for (int j = 0; j < D; ++j)
      values[j] = Part ? load_part(v[t] + column, rest) : load(v[t] + column + j * Vec::N);
    MILLRACE_UNROLL
    for (int g = 0; g < G; ++g) {
      const Vec weight = set1(p[g * kBlock + t]);
      MILLRACE_UNROLL
      for (int j = 0; j < D; ++j) sums[g][j] = fma(weight, values[j], sums[g][j]);
    }
  }
  MILLRACE_UNROLL
  for (int g = 0; g < G; ++g)
    MILLRACE_UNROLL
    for (int j = 0; j < D; ++j) store(o + g * dim + column + j * Vec::N, sums[g][j]);
}

template <class T, int G>
void add_values(float* o, std::int64_t dim, const T* const* v, int count, int head_dim,
                const float* p, const float* rescale) {
  const int full = head_dim / Vec::N * Vec::N;
  int column = 0;
  for (; column + kDimTile * Vec::N <= full; column += kDimTile * Vec::N)
    add_value_columns<T, G, kDimTile, false>(o, dim, v, count, column, 0, p, rescale);
  for (; column < full; column += Vec::N)
    add_value_columns<T, G, 1, false>(o, dim, v, count, column, 0, p, rescale);
  if (head_dim > full)
    add_value_columns<T, G, 1, true>(o, dim, v, count, column, head_dim - full, p, rescale);
}

// Scale and mask one lane's scores, turn them to probabilities under its running maximum.
// Positions of the block outside [first, last) are hidden.
void update_softmax(const Scratch& s, int lane, int first, int last, float scale) {
  float* p = s.p + lane * kBlock;
  const float hidden = -__builtin_inff();
  for (int t = 0; t < first; ++t) p[t] = hidden;
  for (int t = last; t < kBlock; ++t) p[t] = hidden;
  const Vec factor = set1(scale);
  Vec best = set1(s.maximum[lane]);
  for (int t = 0; t < kBlock; t += Vec::N) {
    const Vec scaled = mul(load(p + t), factor);
    store(p + t, scaled);
    best = max(best, scaled);
  }
  const float maximum = largest(best);
  if (maximum == hidden) {  // this lane has seen nothing yet
    for (int t = 0; t < kBlock; t += Vec::N) store(p + t, zero());
    s.rescale[lane] = 1.0f;
    return;
  }
  float decay[Vec::N];
  store(decay, exp(set1(s.maximum[lane] - maximum)));
  Vec sums = zero();
  for (int t = 0; t < kBlock; t += Vec::N) {
    const Vec weight = exp(sub(load(p + t), set1(maximum)));
    store(p + t, weight);
    sums = add(sums, weight);
  }
  s.maximum[lane] = maximum;
  s.rescale[lane] = decay[0];
  s.total[lane] = s.total[lane] * decay[0] + sum(sums);
}

struct Reach {
  int first, last;
};

// The positions that a lane sees, within [begin, begin + count) and counted from `begin`.
Reach reach_of(const AttentionCall& c, const AttentionTask& task, int row, int begin, int count) {
  const int position = task.first_position + row;
  int first = c.window ? position - c.window + 1 - begin : 0;
  int last = position + 1 - begin;
  first = first < 0 ? 0 : first > count ? count : first;
  last = last > count ? count : last < first ? first : last;
  return {first, last};
}

// Where the K and V rows of up to kSplit positions lie.
template <class T>
struct Rows {
  const T* k[kSplit];
  const T* v[kSplit];

  Rows(const AttentionCall& c, const AttentionTask& task) {
    const std::int64_t head_stride = static_cast<std::int64_t>(c.page_tokens) * c.head_dim;
    const std::int64_t kv_stride = head_stride * c.kv_heads;
    const T* pool = static_cast<const T*>(c.kv) + task.kv_head * head_stride;
    int page = task.begin / c.page_tokens;
    int offset = task.begin % c.page_tokens;
    for (int t = 0; t < task.end - task.begin; ++t) {
      k[t] = pool + 2 * kv_stride * task.pages[page] +
             static_cast<std::int64_t>(offset) * c.head_dim;
      v[t] = k[t] + kv_stride;
      if (++offset == c.page_tokens) {
        offset = 0;
        ++page;
      }
    }
  }
};

template <class T>
void attend_block(const AttentionCall& c, const AttentionTask& task, const Scratch& s,
                  const T* const* k, const T* const* v, int begin, int count) {
  const int group = c.q_heads / c.kv_heads;
  const int lanes = task.rows * group;
  for (int lane = 0; lane < lanes; lane += kLaneTile) {
    const float* q = s.q + lane * s.dim;
    float* p = s.p + lane * kBlock;
    switch (lanes - lane) {
      case 1: score_lanes<T, 1>(q, s.dim, k, count, c.head_dim, p); break;
      case 2: score_lanes<T, 2>(q, s.dim, k, count, c.head_dim, p); break;
#if defined(__AVX512F__)
      case 3: score_lanes<T, 3>(q, s.dim, k, count, c.head_dim, p); break;
#endif
      default: score_lanes<T, kLaneTile>(q, s.dim, k, count, c.head_dim, p);
    }
  }
  for (int lane = 0; lane < lanes; ++lane) {
    const Reach reach = reach_of(c, task, lane / group, begin, count);
    update_softmax(s, lane, reach.first, reach.last, c.scale);
  }
  for (int lane = 0; lane < lanes; lane += kLaneTile) {
    float* o = s.o + lane * s.dim;
    const float* p = s.p + lane * kBlock;
    const float* r = s.rescale + lane;
    switch (lanes - lane) {
      case 1: add_values<T, 1>(o, s.dim, v, count, c.head_dim, p, r); break;
      case 2: add_values<T, 2>(o, s.dim, v, count, c.head_dim, p, r); break;
#if defined(__AVX512F__)
      case 3: add_values<T, 3>(o, s.dim, v, count, c.head_dim, p, r); break;
#endif
      default: add_values<T, kLaneTile>(o, s.dim, v, count, c.head_dim, p, r);
    }
  }
}

// out row = o / total, and the natural log-sum-exp; zeros and -inf where nothing was seen.
template <class T>
void finish_lane(const AttentionCall& c, const AttentionTask& task, int lane, const float* o,
                 float maximum, float total) {
  const int group = c.q_heads / c.kv_heads;
  const std::int64_t row = task.first_row + lane / group;
  const std::int64_t head = task.kv_head * group + lane % group;
  T* out = static_cast<T*>(c.out) + (row * c.q_heads + head) * c.head_dim;
  const Vec factor = set1(total == 0.0f ? 0.0f : 1.0f / total);
  int j = 0;
  for (; j + Vec::N <= c.head_dim; j += Vec::N) store(out + j, mul(load(o + j), factor));
  if (j < c.head_dim) store_part(out + j, mul(load(o + j), factor), c.head_dim - j);
  if (c.lse)
    c.lse[row * c.q_heads + head] =
        total == 0.0f ? -__builtin_inff() : maximum + __builtin_logf(total);
}

template <class T>
void attention(const AttentionCall& c, const AttentionTask& task, float* base, float* partials) {
  const int group = c.q_heads / c.kv_heads;
  const int lanes = task.rows * group;
  const Scratch s(base, lanes, c.head_dim);
  for (int lane = 0; lane < lanes; ++lane) {
    const std::int64_t row = task.first_row + lane / group;
    const std::int64_t head = task.kv_head * group + lane % group;
    const T* q = static_cast<const T*>(c.q) + row * c.q_stride_n + head * c.q_stride_h;
    for (std::int64_t j = 0; j < s.dim; ++j) {
      s.q[lane * s.dim + j] = j < c.head_dim ? to_float(q[j]) : 0.0f;
      s.o[lane * s.dim + j] = 0.0f;
    }
    s.maximum[lane] = -__builtin_inff();
    s.total[lane] = 0.0f;
  }
  const Rows<T> at(c, task);
  for (int begin = task.begin; begin < task.end; begin += kBlock) {
    const int done = begin - task.begin;
    const int left = task.end - begin;
    attend_block<T>(c, task, s, at.k + done, at.v + done, begin, left < kBlock ? left : kBlock);
  }
  if (task.splits == 1) {
    for (int lane = 0; lane < lanes; ++lane)
      finish_lane<T>(c, task, lane, s.o + lane * s.dim, s.maximum[lane], s.total[lane]);
    return;
  }
  float* partial = partials + task.partial;
  __builtin_memcpy(partial, s.o, static_cast<std::size_t>(lanes * s.dim) * sizeof(float));
  __builtin_memcpy(partial + lanes * s.dim, s.maximum, static_cast<unsigned>(lanes) * 4u);
  __builtin_memcpy(partial + lanes * s.dim + lanes, s.total, static_cast<unsigned>(lanes) * 4u);
}

// Join the spans of one tile, always first to last. `first` is the tile's first task; the partial
// results of its spans lie `stride` floats apart, and the first of them takes the sum.
template <class T>
void attention_merge(const AttentionCall& c, const AttentionTask& first, const float* partials,
                     std::int64_t stride) {
  const int lanes = first.rows * (c.q_heads / c.kv_heads);
  const std::int64_t dim = round_up(c.head_dim, 16);
  const float* base = partials + first.partial;
  for (int lane = 0; lane < lanes; ++lane) {
    float maximum = -__builtin_inff();
    for (int i = 0; i < first.splits; ++i) {
      const float m = base[i * stride + lanes * dim + lane];
      maximum = m > maximum ? m : maximum;
    }
    float total = 0.0f;
    float* sums = const_cast<float*>(base) + lane * dim;
    for (int i = 0; i < first.splits; ++i) {
      const float* part = base + i * stride;
      const float m = part[lanes * dim + lane];
      float factor[Vec::N];
      store(factor, m == -__builtin_inff() ? zero() : exp(set1(m - maximum)));
      total += part[lanes * dim + lanes + lane] * factor[0];
      for (std::int64_t j = 0; j < dim; j += Vec::N) {
        const Vec scaled = mul(load(part + lane * dim + j), set1(factor[0]));
        store(sums + j, i == 0 ? scaled : add(load(sums + j), scaled));
      }
    }
    finish_lane<T>(c, first, lane, sums, maximum, total);
  }
}

constexpr AttentionKernels kAttention = {
    attention_scratch,
    attention_partial,
    {attention<float>, attention<bf16>},
    {attention_merge<float>, attention_merge<bf16>},
};
