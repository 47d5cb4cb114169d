// x @ weight.T. Included by kernels_impl.hpp, after simd.hpp and amx.hpp.
//
// Weights stay as the checkpoint has them, [o, k]. Up to kFewRows rows of x go along with the weights
// as they stream past (linear_few_impl.hpp). For more rows, a task copies some weights to the cache and
// multiplies them with all its rows of x. Both kernels add in the same order, which depends on k alone. So
// the result of a row has the same bits among any number of rows. Where the processor multiplies tiles of bfloat16,
// one kernel takes any number of rows (linear_amx_impl.hpp).

namespace linears {

constexpr int kFewRows = 8;
constexpr std::int64_t kSumDepth = 256;  // elements of k whose lanes are added up together
constexpr int kFewUnit = 64;  // a multiple of every step of few rows

#include "linear_few_impl.hpp"

#if defined(__AVX512F__)
constexpr int kDotRows = 6;  // rows of x that share a tile of sums in registers
#else
constexpr int kDotRows = 3;
#endif
constexpr int kDotOutputs = 4;
constexpr std::int64_t kSweep = 16;       // outputs whose weights are copied at a time

inline Vec multiply_add_step(const float* a, const float* b, Vec sum) {
  return fma(load(a), load(b), sum);
}
#if defined(__AVX512BF16__)
inline Vec multiply_add_step(const bf16* a, const bf16* b, Vec sum) {
  return {_mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(_mm512_loadu_si512(a)),
                           reinterpret_cast<__m512bh>(_mm512_loadu_si512(b)))};
}
#endif

// Adds up to kSumDepth elements of k, of M rows and kDotOutputs outputs, to totals[M][kSweep].
template <int M, class X>
inline void dot_tile(const X* x, std::int64_t x_stride, const X* w, std::int64_t depth, bool is_first,
                     float* totals) {
  constexpr int kStep = 4 * Vec::N / static_cast<int>(sizeof(X));
  Vec sums[M][kDotOutputs];
  MILLRACE_UNROLL
  for (int m = 0; m < M; ++m)
    MILLRACE_UNROLL
    for (int r = 0; r < kDotOutputs; ++r) sums[m][r] = zero();
  for (std::int64_t j = 0; j < depth; j += kStep) {
    MILLRACE_UNROLL
    for (int r = 0; r < kDotOutputs; ++r)
      MILLRACE_UNROLL
      for (int m = 0; m < M; ++m)
        sums[m][r] = multiply_add_step(w + r * kSumDepth + j, x + m * x_stride + j, sums[m][r]);
  }
  MILLRACE_UNROLL
  for (int m = 0; m < M; ++m)
    add_totals(sums[m][0], sums[m][1], sums[m][2], sums[m][3], is_first, totals + m * kSweep);
}

template <class X, int M = kDotRows>
inline void dot_up_to(std::int64_t rows, const X* x, std::int64_t x_stride, const X* w,
                      std::int64_t depth, bool is_first, float* totals) {
  if constexpr (M > 1)
    if (rows < M) return dot_up_to<X, M - 1>(rows, x, x_stride, w, depth, is_first, totals);
  dot_tile<M>(x, x_stride, w, depth, is_first, totals);
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
void multiply_many(const LinearCall& c, Range rows, Range outputs, float* work) {
  using S = typename FewStepOf<T>::type;
  using X = typename S::X;
  const std::int64_t stride = round_up(c.k, kFewUnit);
  X* x = reinterpret_cast<X*>(work);  // [rows, stride]
  X* weights = reinterpret_cast<X*>(work + rows.size() * stride);  // [kSweep, kSumDepth]
  float* totals = work + rows.size() * stride + kSweep * kSumDepth;  // [rows, kSweep]
  for (std::int64_t row = 0; row < rows.size(); ++row)
    arrange_row<S>(static_cast<const X*>(c.x) + (rows.first + row) * c.x_stride, c.k, stride,
                   x + row * stride);
  const std::int64_t tiles = (rows.size() + kDotRows - 1) / kDotRows;
  for (std::int64_t o = outputs.first; o < outputs.last; o += kSweep) {
    const std::int64_t count = o + kSweep < outputs.last ? kSweep : outputs.last - o;
    for (std::int64_t k = 0; k < stride; k += kSumDepth) {
      const std::int64_t depth = k + kSumDepth < stride ? kSumDepth : stride - k;
      for (std::int64_t i = 0; i < round_up(count, kDotOutputs); ++i)
        arrange_weights<S>(static_cast<const T*>(c.weight) + (o + i) * c.k + k,
                           i < count ? c.k - k : 0, depth, weights + i * kSumDepth);
      for (std::int64_t tile = 0; tile < tiles; ++tile) {  // as equal as can be
        const std::int64_t row = rows.size() * tile / tiles;
        const std::int64_t size = rows.size() * (tile + 1) / tiles - row;
        for (std::int64_t i = 0; i < count; i += kDotOutputs)
          dot_up_to(size, x + row * stride + k, stride, weights + i * kSumDepth, depth, k == 0,
                    totals + row * kSweep + i);
      }
    }
    finish<T>(c, rows, {o, o + count}, totals, kSweep);
  }
}

template <class T>
void run(const LinearCall& c, Range rows, Range outputs, float* work) {
  if (rows.size() <= kFewRows)
    multiply_few<T>(c, rows, outputs, work);
  else
    multiply_many<T>(c, rows, outputs, work);
}

#if defined(__AMX_BF16__)
#include "linear_amx_impl.hpp"
#endif

std::int64_t work_floats(Type type, std::int64_t rows, std::int64_t k) {
#if defined(__AMX_BF16__)
  if (type == Type::b16) return amx_work_floats(k);
#endif
  (void)type;
  const std::int64_t arranged = rows * round_up(k, kFewUnit);
  return rows <= kFewRows ? arranged : arranged + kSweep * (kSumDepth + rows);
}

#if defined(__AVX512BF16__)
using Prepared = bf16;
#else
using Prepared = float;
#endif

#if defined(__AMX_BF16__)
std::int64_t prepared_stride(std::int64_t k) { return amx_steps(k) * kAmxElements; }
#else
// A line more than the row: rows a power of two apart would share their places in the cache.
std::int64_t prepared_stride(std::int64_t k) { return round_up(k, 32) + 16; }
#endif

std::int64_t prepared_bytes(Type type, std::int64_t k) {
  return type == Type::f32 ? 0 : prepared_stride(k) * static_cast<std::int64_t>(sizeof(Prepared));
}

// To floats, or where pairs are multiplied to rows that end in a whole pair.
void prepare_bf16(const void* source, std::int64_t stride, std::int64_t rows, std::int64_t k,
                  void* target) {
#if defined(__AMX_BF16__)
  prepare_amx(source, stride, rows, k, target);
#else
  const bf16* x = static_cast<const bf16*>(source);
  Prepared* to = static_cast<Prepared*>(target);
  for (std::int64_t row = 0; row < rows; ++row, x += stride, to += prepared_stride(k)) {
    std::int64_t j = 0;
    for (; j + Vec::N <= k; j += Vec::N) store(to + j, load(x + j));
    if (j < k) store(to + j, load_part(x + j, static_cast<int>(k - j)));
  }
#endif
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
