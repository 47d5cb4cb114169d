// The CPU kernels, written once over Vec (simd.hpp). Each kernels_<isa>.cpp includes this file
// compiled for its instruction set and names its table with MILLRACE_ISA and MILLRACE_TABLE.
//
// Everything accumulates in float32, in an order that depends on a row's own length alone: never on
// the batch around it or on the number of threads.

#include "kernels.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// In front of every loop over registers: left as a loop, it would put them in memory.
#if defined(__clang__)
#define MILLRACE_UNROLL _Pragma("unroll")
#else
#define MILLRACE_UNROLL _Pragma("GCC unroll 16")
#endif

namespace millrace {
namespace {

#include "simd.hpp"

inline Vec rounded_as(Vec a, const float*) { return a; }
inline Vec rounded_as(Vec a, const bf16*) {
  bf16 lanes[Vec::N];
  store(lanes, a);
  return load(lanes);
}

inline std::int64_t round_up(std::int64_t value, std::int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

// ---- paged attention -------------------------------------------------------------------------

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

// ---- linear for few rows ---------------------------------------------------------------------

// How x is held while weights stream past: float32, or bfloat16 where the machine multiplies pairs.
#if defined(__AVX512BF16__)
inline __m512bh load_pairs(const bf16* p) {
  return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p));
}
inline __m512bh load_pairs_part(const bf16* p, int n) {
  const __mmask32 lanes = static_cast<__mmask32>((1ull << n) - 1ull);
  return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(lanes, p));
}
struct PairStep {
  using Weight = bf16;
  using X = bf16;
  using Operand = __m512bh;
  static constexpr int N = 32;
  static Operand weight(const bf16* p) { return load_pairs(p); }
  static Operand weight_part(const bf16* p, int n) { return load_pairs_part(p, n); }
  static Operand x(const bf16* p) { return load_pairs(p); }
  static Vec fma(Operand a, Operand b, Vec c) { return {_mm512_dpbf16_ps(c.v, a, b)}; }
};
#endif

inline Vec multiply_add(Vec a, Vec b, Vec c) { return fma(a, b, c); }

template <class T>
struct FloatStep {
  using Weight = T;
  using X = float;
  using Operand = Vec;
  static constexpr int N = Vec::N;
  static Operand weight(const T* p) { return load(p); }
  static Operand weight_part(const T* p, int n) { return load_part(p, n); }
  static Operand x(const float* p) { return load(p); }
  static Vec fma(Operand a, Operand b, Vec c) { return multiply_add(a, b, c); }
};

#if defined(__AVX512BF16__)
template <class T>
struct StepOf {
  using type = FloatStep<T>;
};
template <>
struct StepOf<bf16> {
  using type = PairStep;
};
#else
template <class T>
struct StepOf {
  using type = FloatStep<T>;
};
#endif

template <class T>
using Step = typename StepOf<T>::type;

inline std::int64_t padded_k(std::int64_t k) { return round_up(k, 32); }

std::int64_t packed_bytes(Type type, int m, std::int64_t k) {
  const std::size_t element =
      type == Type::f32 ? sizeof(Step<float>::X) : sizeof(Step<bf16>::X);
  return m * padded_k(k) * static_cast<std::int64_t>(element);
}

template <class T>
void pack_x(const void* source, std::int64_t stride, int m, std::int64_t k, void* packed) {
  using X = typename Step<T>::X;
  for (int row = 0; row < m; ++row) {
    const T* x = static_cast<const T*>(source) + row * stride;
    X* to = static_cast<X*>(packed) + row * padded_k(k);
    std::int64_t j = 0;
    for (; j + Vec::N <= k; j += Vec::N) store(to + j, load(x + j));
    if (j < k) store(to + j, load_part(x + j, static_cast<int>(k - j)));
    for (j = round_up(k, Vec::N); j < padded_k(k); j += Vec::N) store(to + j, zero());
  }
}

// R outputs for M rows of x: each weight vector is loaded once for all M.
template <class T, int M, int R>
void linear_tile(const LinearCall& c, const typename Step<T>::X* x, T* out, std::int64_t first) {
  using S = Step<T>;
  const std::int64_t ldx = padded_k(c.k);
  const T* w = static_cast<const T*>(c.weight) + first * c.k;
  Vec sums[M][R];
  MILLRACE_UNROLL
  for (int m = 0; m < M; ++m)
    MILLRACE_UNROLL
    for (int r = 0; r < R; ++r) sums[m][r] = zero();
  std::int64_t j = 0;
  for (; j + S::N <= c.k; j += S::N) {
    typename S::Operand weights[R];
    MILLRACE_UNROLL
    for (int r = 0; r < R; ++r) {
      weights[r] = S::weight(w + r * c.k + j);
      __builtin_prefetch(w + (R + r) * c.k + j);  // of the next tile
    }
    MILLRACE_UNROLL
    for (int m = 0; m < M; ++m) {
      const typename S::Operand row = S::x(x + m * ldx + j);
      MILLRACE_UNROLL
      for (int r = 0; r < R; ++r) sums[m][r] = S::fma(weights[r], row, sums[m][r]);
    }
  }
  if (j < c.k) {
    MILLRACE_UNROLL
    for (int r = 0; r < R; ++r) {
      const typename S::Operand weight = S::weight_part(w + r * c.k + j, static_cast<int>(c.k - j));
      MILLRACE_UNROLL
      for (int m = 0; m < M; ++m) sums[m][r] = S::fma(weight, S::x(x + m * ldx + j), sums[m][r]);
    }
  }
  const T* bias = static_cast<const T*>(c.bias);
  MILLRACE_UNROLL
  for (int m = 0; m < M; ++m) {
    float result[R];
    if constexpr (R == 1) {
      result[0] = sum(sums[m][0]);
    } else {
      MILLRACE_UNROLL
      for (int r = 0; r < R; r += 4)
        sum4(sums[m][r], sums[m][r + 1], sums[m][r + 2], sums[m][r + 3], result + r);
    }
    T* to = out + m * c.o + first;
    MILLRACE_UNROLL
    for (int r = 0; r < R; ++r)
      assign(to + r, bias ? result[r] + to_float(bias[first + r]) : result[r]);
  }
}

template <class T, int M>
void linear_rows(const LinearCall& c, int row, std::int64_t first, std::int64_t last) {
#if defined(__AVX512F__)
  constexpr int R = M <= 2 ? 8 : 4;
#else
  constexpr int R = 4;
#endif
  const auto* x = static_cast<const typename Step<T>::X*>(c.x) + row * padded_k(c.k);
  T* out = static_cast<T*>(c.out) + row * c.o;
  for (; first + R <= last; first += R) linear_tile<T, M, R>(c, x, out, first);
  for (; first < last; ++first) linear_tile<T, M, 1>(c, x, out, first);
}

#if defined(__AVX512F__)
constexpr int kRowTile = 4;
#else
constexpr int kRowTile = 2;
#endif

// Few enough outputs at a time that their weights stay in the cache for every row tile.
constexpr std::int64_t kOutputTile = 8;

template <class T>
void linear(const LinearCall& c, std::int64_t first, std::int64_t last) {
  if (c.m == 1) return linear_rows<T, 1>(c, 0, first, last);
  for (; first < last; first += kOutputTile) {
    const std::int64_t end = first + kOutputTile < last ? first + kOutputTile : last;
    for (int row = 0; row < c.m; row += kRowTile) {
      switch (c.m - row) {
        case 1: linear_rows<T, 1>(c, row, first, end); break;
        case 2: linear_rows<T, 2>(c, row, first, end); break;
#if defined(__AVX512F__)
        case 3: linear_rows<T, 3>(c, row, first, end); break;
#endif
        default: linear_rows<T, kRowTile>(c, row, first, end);
      }
    }
  }
}

// ---- row by row ------------------------------------------------------------------------------

template <class T>
void rms_norm(const void* x, std::int64_t x_stride, const void* residual, void* total,
              const void* weight, void* out, std::int64_t first, std::int64_t last,
              std::int64_t width, float eps) {
  const std::int64_t full = width / Vec::N * Vec::N;
  const int rest = static_cast<int>(width - full);
  const T* w = static_cast<const T*>(weight);
  for (std::int64_t n = first; n < last; ++n) {
    const T* row = static_cast<const T*>(x) + n * x_stride;
    if (residual) {
      const T* other = static_cast<const T*>(residual) + n * width;
      T* to = static_cast<T*>(total) + n * width;
      for (std::int64_t j = 0; j < full; j += Vec::N) store(to + j, add(load(other + j), load(row + j)));
      if (rest)
        store_part(to + full, add(load_part(other + full, rest), load_part(row + full, rest)), rest);
      row = to;
    }
    Vec squares[4] = {zero(), zero(), zero(), zero()};
    std::int64_t j = 0;
    for (int i = 0; j < full; j += Vec::N, i = (i + 1) & 3) {
      const Vec a = load(row + j);
      squares[i] = fma(a, a, squares[i]);
    }
    if (rest) {
      const Vec a = load_part(row + full, rest);
      squares[0] = fma(a, a, squares[0]);
    }
    const float sum_squares = sum(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
    const Vec inverse =
        set1(1.0f / __builtin_sqrtf(sum_squares / static_cast<float>(width) + eps));
    T* to = static_cast<T*>(out) + n * width;
    for (j = 0; j < full; j += Vec::N)
      store(to + j, mul(load(w + j), rounded_as(mul(load(row + j), inverse), to)));
    if (rest)
      store_part(to + full,
                 mul(load_part(w + full, rest),
                     rounded_as(mul(load_part(row + full, rest), inverse), to)),
                 rest);
  }
}

template <class T>
inline Vec silu_mul_vec(Vec gate, Vec up, const T* like) {
  const Vec one = set1(1.0f);
  const Vec silu = div(gate, add(one, exp(sub(zero(), gate))));
  return mul(rounded_as(silu, like), up);
}

template <class T>
void silu_mul(const void* gate_up, void* out, std::int64_t first, std::int64_t last,
              std::int64_t width) {
  const std::int64_t full = width / Vec::N * Vec::N;
  const int rest = static_cast<int>(width - full);
  for (std::int64_t n = first; n < last; ++n) {
    const T* gate = static_cast<const T*>(gate_up) + n * 2 * width;
    const T* up = gate + width;
    T* to = static_cast<T*>(out) + n * width;
    for (std::int64_t j = 0; j < full; j += Vec::N)
      store(to + j, silu_mul_vec(load(gate + j), load(up + j), to));
    if (rest)
      store_part(to + full,
                 silu_mul_vec(load_part(gate + full, rest), load_part(up + full, rest), to), rest);
  }
}

template <class T>
void rope(void* x, std::int64_t stride_n, int heads, int head_dim, const float* cos,
          const float* sin, std::int64_t first, std::int64_t last) {
  const int half = head_dim / 2;
  const int full = half / Vec::N * Vec::N;
  const int rest = half - full;
  for (std::int64_t n = first; n < last; ++n) {
    const float* c = cos + n * half;
    const float* s = sin + n * half;
    for (int h = 0; h < heads; ++h) {
      T* low = static_cast<T*>(x) + n * stride_n + static_cast<std::int64_t>(h) * head_dim;
      T* high = low + half;
      for (int j = 0; j < full; j += Vec::N) {
        const Vec a = load(low + j);
        const Vec b = load(high + j);
        store(low + j, sub(mul(a, load(c + j)), mul(b, load(s + j))));
        store(high + j, add(mul(b, load(c + j)), mul(a, load(s + j))));
      }
      if (rest) {
        const Vec a = load_part(low + full, rest);
        const Vec b = load_part(high + full, rest);
        const Vec cc = load_part(c + full, rest);
        const Vec ss = load_part(s + full, rest);
        store_part(low + full, sub(mul(a, cc), mul(b, ss)), rest);
        store_part(high + full, add(mul(b, cc), mul(a, ss)), rest);
      }
    }
  }
}

}  // namespace

const Kernels& MILLRACE_TABLE() {
  static constexpr Kernels table = {
      MILLRACE_ISA,
      attention_scratch,
      attention_partial,
      {attention<float>, attention<bf16>},
      {attention_merge<float>, attention_merge<bf16>},
      packed_bytes,
      {pack_x<float>, pack_x<bf16>},
      {linear<float>, linear<bf16>},
      {rms_norm<float>, rms_norm<bf16>},
      {silu_mul<float>, silu_mul<bf16>},
      {rope<float>, rope<bf16>},
  };
  return table;
}

}  // namespace millrace
