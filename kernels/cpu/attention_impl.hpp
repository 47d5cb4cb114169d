// Paged attention: softmax, and the joining of partial results. Included by kernels_impl.hpp, after
// simd.hpp and tile.hpp.
//
// Scores and running maxima are kept in units of log2, so that a weight is a bare power of two.
// K/V is cut at fixed slots, and slots that a row doesn't see leave its sums as they are: a row's
// result depends on its own q and position, on its sequence's K/V and on the kernel, and on nothing else.

constexpr float kHidden = -__builtin_inff();
constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

// 2^x for x <= 0 or barely above, about 1 ulp; below -126.5 it gives 0. 2^r is a minimax polynomial
// in r of degree 5 over [-1/2, 1/2], exact at 0.
inline Vec exp2(Vec x) {
  x = max(set1(-127.0f), x);  // the constant first: max then hands on a NaN in x
  const Vec n = round_nearest(x);
  const Vec r = sub(x, n);
  Vec p = set1(1.326472731307149e-3f);
  p = fma(p, r, set1(9.671512991189957e-3f));
  p = fma(p, r, set1(5.550733581185341e-2f));
  p = fma(p, r, set1(2.4022242426872253e-1f));
  p = fma(p, r, set1(6.931470036506653e-1f));
  p = fma(p, r, set1(1.0f));
  return mul(p, power_of_two(n));
}

// tanh by e^2x - 1 = t, tanh = t / (t + 2): accurate where x is small as well.
inline Vec tanh(Vec x) {
  const Exponent e = exponent_of(max(set1(-20.0f), min(set1(20.0f), add(x, x))));
  const Vec power = power_of_two(e.n);
  const Vec t = fma(fma(e.tail, e.r, e.r), power, sub(power, set1(1.0f)));
  return div(t, add(t, set1(2.0f)));
}

inline int smaller(int a, int b) { return a < b ? a : b; }
inline int larger(int a, int b) { return a > b ? a : b; }

// Floats from one lane's row of d to the next, where rows are padded.
inline std::int64_t padded(int head_dim) { return round_up(head_dim, 32); }

std::int64_t attention_partial(int lanes, int head_dim) { return lanes * (padded(head_dim) + 2); }

// From a dot product to a score in units of log2.
struct Scores {
  float sign;    // of the scale; goes into q
  float factor;  // what is left of it, above 0
  float inner, outer;

  explicit Scores(const AttentionCall& c)
      : sign(c.scale > 0.0f ? 1.0f : c.scale < 0.0f ? -1.0f : 0.0f),
        factor(c.scale == 0.0f || c.soft_cap > 0.0f ? 1.0f : c.scale * sign * kLog2e),
        inner(c.soft_cap > 0.0f ? c.scale * sign / c.soft_cap : 0.0f),
        outer(c.soft_cap * kLog2e) {}

  bool capped() const { return outer > 0.0f; }
  void cap(float* scores, int from, int to) const {
    for (int t = from; t < to; t += Vec::N)
      store(scores + t, mul(set1(outer), tanh(mul(set1(inner), load(scores + t)))));
  }
};

// The positions that a row sees: low to high, both included.
struct Reach {
  int low, high;
};

inline int lanes_of(const AttentionCall& c, const AttentionTask& task) {
  return task.heads * task.rows * (c.q_heads / c.kv_heads);
}

// Which row of the call and which q head a lane of the task stands for.
struct LaneAt {
  std::int64_t row;
  std::int64_t head;

  LaneAt(const AttentionCall& c, const AttentionTask& task, int lane) {
    const int group = c.q_heads / c.kv_heads;
    const int within = lane % (task.rows * group);
    row = task.first_row + within / group;
    head = (task.kv_head + lane / (task.rows * group)) * group + within % group;
  }
};

inline Reach reach_of(const AttentionCall& c, const AttentionTask& task, int row) {
  const int position = task.q_positions ? task.q_positions[row] : task.first_position + row;
  return {c.window ? position - c.window + 1 : -__INT_MAX__, c.causal ? position : __INT_MAX__};
}

// The positions of up to N slots, and whether rows see all or none of them.
template <int N>
struct Positions {
  int at[N];
  int count;
  int lowest, highest;

  void read(const AttentionTask& task, int begin, int slots) {
    count = slots;
    if (task.kv_positions == nullptr) {
      for (int t = 0; t < N; ++t) at[t] = begin + t;
      lowest = begin;
      highest = begin + slots - 1;
      return;
    }
    const std::int32_t* from = task.kv_positions + begin;
    lowest = highest = from[0];
    for (int t = 0; t < slots; ++t) {
      at[t] = from[t];
      lowest = smaller(lowest, from[t]);
      highest = larger(highest, from[t]);
    }
  }
  bool all_hidden(Reach widest) const { return lowest > widest.high || highest < widest.low; }
  bool all_seen(Reach narrowest) const {
    return lowest >= narrowest.low && highest <= narrowest.high;
  }
  // Hide the scores in [from, to) that a row with this reach doesn't see; both within the block.
  void hide(float* scores, int from, int to, Reach reach) const {
    for (int t = from; t < to; ++t)
      scores[t] = (at[t] >= reach.low) & (at[t] <= reach.high) ? scores[t] : kHidden;
  }
};

// Where the K rows of up to N slots lie, for the task's first kv head; those of the next head lie
// head_stride elements behind them, V rows v_offset.
template <class T, int N>
struct Rows {
  const T* k[N];
  std::int64_t head_stride;
  std::int64_t v_offset;

  Rows(const AttentionCall& c, const AttentionTask& task, int begin, int end) {
    head_stride = static_cast<std::int64_t>(c.page_tokens) * c.head_dim;
    v_offset = head_stride * c.kv_heads;
    const T* pool = static_cast<const T*>(c.kv) + task.kv_head * head_stride;
    int page = begin / c.page_tokens;
    int offset = begin % c.page_tokens;
    for (int t = 0; t < end - begin; ++page, offset = 0) {
      const T* row = pool + 2 * v_offset * task.pages[page] +
                     static_cast<std::int64_t>(offset) * c.head_dim;
      for (; offset < c.page_tokens && t < end - begin; ++offset, ++t, row += c.head_dim)
        k[t] = row;
    }
  }
};

// Turns the scores [from, to) of one lane into weights, in place, under its running maximum; from
// and to are multiples of Vec::N. Returns by how much the sums so far shrink.
template <class W>
inline float update_softmax(float* scores, int from, int to, float factor, float& maximum,
                            float& total) {
  Vec best = load(scores + from);
  for (int t = from + Vec::N; t < to; t += Vec::N) best = max(best, load(scores + t));
  const float before = maximum;
  const float now = largest(best) * factor;
  const bool moved = !(now <= before);
  if (moved) maximum = now;
  W* weights = reinterpret_cast<W*>(scores);
  if (maximum == kHidden) {  // this lane has seen nothing yet
    for (int t = from; t < to; t += Vec::N) store(weights + t, zero());
    return 1.0f;
  }
  const Vec scale = set1(factor);
  const Vec offset = set1(-maximum);
  Vec sums = zero();
  for (int t = from; t < to; t += Vec::N) {
    const Vec weight = exp2(fma(load(scores + t), scale, offset));
    store(weights + t, weight);
    sums = add(sums, weight);
  }
  float decay = 1.0f;
  if (moved) {
    float first[Vec::N];
    store(first, exp2(set1(before - maximum)));
    decay = first[0];
  }
  total = total * decay + sum(sums);
  return decay;
}

// out row = o / total, and the natural log-sum-exp; zeros and -inf where nothing was seen.
template <class O>
inline void store_lane(O* out, const float* o, float total, int head_dim) {
  const Vec factor = set1(total == 0.0f ? 0.0f : 1.0f / total);
  int j = 0;
  for (; j + Vec::N <= head_dim; j += Vec::N) store(out + j, mul(load(o + j), factor));
  if (j < head_dim) store_part(out + j, mul(load(o + j), factor), head_dim - j);
}

template <class T>
void finish_lane(const AttentionCall& c, const AttentionTask& task, int lane, const float* o,
                 float maximum, float total) {
  const LaneAt at(c, task, lane);
  const std::int64_t head = at.row * c.q_heads + at.head;
  if (c.float_out)
    store_lane(static_cast<float*>(c.out) + head * c.head_dim, o, total, c.head_dim);
  else
    store_lane(static_cast<T*>(c.out) + head * c.head_dim, o, total, c.head_dim);
  if (c.lse)
    c.lse[head] = total == 0.0f ? kHidden : kLn2 * maximum + __builtin_logf(total);
}

// Hand on the sums of a task: to `out`, or as a partial result.
template <class T>
void finish_task(const AttentionCall& c, const AttentionTask& task, const float* o,
                 const float* maximum, const float* total) {
  const int lanes = lanes_of(c, task);
  const std::int64_t dim = padded(c.head_dim);
  if (task.partial == nullptr) {
    for (int lane = 0; lane < lanes; ++lane)
      finish_lane<T>(c, task, lane, o + lane * dim, maximum[lane], total[lane]);
    return;
  }
  float* partial = task.partial;
  __builtin_memcpy(partial, o, static_cast<std::size_t>(lanes * dim) * sizeof(float));
  __builtin_memcpy(partial + lanes * dim, maximum, static_cast<unsigned>(lanes) * sizeof(float));
  __builtin_memcpy(partial + lanes * (dim + 1), total,
                   static_cast<unsigned>(lanes) * sizeof(float));
}

// The sums of a lane over some K/V: o in units of 2^maximum, and so is total.
struct LaneSums {
  float* o;
  float& maximum;
  float& total;
};

// Adds a lane's sums over the next span to those over the spans before.
inline void fold_lane(LaneSums sums, const float* o, float maximum, float total,
                      std::int64_t dim) {
  if (maximum == kHidden) return;
  if (sums.maximum == kHidden) {
    __builtin_memcpy(sums.o, o, static_cast<std::size_t>(dim) * sizeof(float));
    sums.maximum = maximum;
    sums.total = total;
    return;
  }
  const float both = maximum > sums.maximum ? maximum : sums.maximum;
  float factors[2][Vec::N];
  store(factors[0], exp2(set1(sums.maximum - both)));
  store(factors[1], exp2(set1(maximum - both)));
  const Vec before = set1(factors[0][0]), share = set1(factors[1][0]);
  for (std::int64_t j = 0; j < dim; j += Vec::N)
    store(sums.o + j, fma(load(o + j), share, mul(load(sums.o + j), before)));
  const float kept = sums.total * factors[0][0];
  sums.total = kept + total * factors[1][0];
  sums.maximum = both;
}

// The sums of a task's lanes.
struct Sums {
  float* o;        // [lanes, dim]
  float* maximum;  // [lanes]
  float* total;    // [lanes]
};

inline void clear_sums(float* o, float* maximum, float* total, std::int64_t lanes, std::int64_t dim) {
  for (std::int64_t i = 0; i < lanes * dim; ++i) o[i] = 0.0f;
  for (std::int64_t lane = 0; lane < lanes; ++lane) {
    maximum[lane] = kHidden;
    total[lane] = 0.0f;
  }
}

// Sums over a task's slots, span after span: `add` leaves those over some slots in `span`. Returns
// `span`, or `before` where there are several.
template <class Add>
inline Sums sum_spans(const AttentionTask& task, Sums span, Sums before, std::int64_t lanes,
                      std::int64_t dim, const Add& add) {
  if (task.end <= span_end(task.begin)) {
    add(task.begin, task.end);
    return span;
  }
  clear_sums(before.o, before.maximum, before.total, lanes, dim);
  for (int begin = task.begin, end; begin < task.end; begin = end) {
    end = smaller(span_end(begin), task.end);
    add(begin, end);
    for (std::int64_t lane = 0; lane < lanes; ++lane)
      fold_lane({before.o + lane * dim, before.maximum[lane], before.total[lane]},
                span.o + lane * dim, span.maximum[lane], span.total[lane], dim);
  }
  return before;
}

template <class T>
void attention_merge(const AttentionCall& c, const AttentionTask& task, int splits,
                     std::int64_t stride) {
  const int lanes = lanes_of(c, task);
  const std::int64_t dim = padded(c.head_dim);
  for (int lane = 0; lane < lanes; ++lane) {
    const auto sums_of = [&](int split) -> LaneSums {
      float* part = task.partial + split * stride;
      return {part + lane * dim, part[lanes * dim + lane], part[lanes * (dim + 1) + lane]};
    };
    const LaneSums sums = sums_of(0);
    for (int i = 1; i < splits; ++i) {
      const LaneSums next = sums_of(i);
      fold_lane(sums, next.o, next.maximum, next.total, dim);
    }
    finish_lane<T>(c, task, lane, sums.o, sums.maximum, sums.total);
  }
}

// out = out * share + other * other_share, each by its part of both sums; lse likewise.
template <class O, class P>
void attention_join(void* out, float* lse, const void* other, const float* other_lse,
                    std::int64_t rows, int head_dim) {
  for (std::int64_t i = 0; i < rows; ++i) {
    if (other_lse[i] == kHidden) continue;
    const float maximum = lse[i] > other_lse[i] ? lse[i] : other_lse[i];
    const float mine = __builtin_expf(lse[i] - maximum);
    const float theirs = __builtin_expf(other_lse[i] - maximum);
    lse[i] = maximum + __builtin_logf(mine + theirs);
    const Vec share = set1(mine / (mine + theirs));
    const Vec other_share = set1(theirs / (mine + theirs));
    O* row = static_cast<O*>(out) + i * head_dim;
    const P* from = static_cast<const P*>(other) + i * head_dim;
    int j = 0;
    for (; j + Vec::N <= head_dim; j += Vec::N)
      store(row + j, fma(load(from + j), other_share, mul(load(row + j), share)));
    if (j < head_dim) {
      const int rest = head_dim - j;
      const Vec part = mul(load_part(row + j, rest), share);
      store_part(row + j, fma(load_part(from + j, rest), other_share, part), rest);
    }
  }
}
