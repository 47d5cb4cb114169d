// x @ weight.T. Included by kernels_impl.hpp, after simd.hpp, tile.hpp and amx.hpp.
//
// Weights stay as the checkpoint has them, [o, k]. Up to kFewRows rows of x go along with the weights
// as they stream past (linear_few_impl.hpp). More rows take panels of weights (linear_tiles_impl.hpp), or
// where a row must have the same bits among any number of rows, dot products that add in the order of few
// rows (linear_dots_impl.hpp). Where the processor multiplies tiles of bfloat16, one kernel takes any
// number of rows (linear_amx_impl.hpp).

// Whether vectors multiply pairs of bfloat16. Intel's take twice as long for a pair as for two floats, and
// only Intel's processors have the matrix unit.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define MILLRACE_PAIR_LINEARS
#endif

namespace linears {

constexpr int kFewUnit = 64;  // a multiple of every step of few rows

#include "linear_few_impl.hpp"

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

#include "linear_dots_impl.hpp"
#include "linear_tiles_impl.hpp"
#if defined(__AMX_BF16__)
#include "linear_amx_impl.hpp"
#endif

// One order of sums for any number of rows, which `prepare_arranged` has prepared.
template <class T>
void run_alike(const LinearCall& c, Range rows, Range outputs, float* work) {
#if defined(__AMX_BF16__)
  if constexpr (sizeof(T) == 2) return multiply_amx(c, rows, outputs, work);
#endif
  using X = typename FewStepOf<T>::type::X;
  if (rows.size() <= kFewRows)
    multiply_few<T>(c, static_cast<const X*>(c.x) + rows.first * c.x_stride, c.x_stride, rows, outputs);
  else
    multiply_dots<T>(c, rows, outputs, work);
}

std::int64_t work_floats_alike(Type type, std::int64_t rows, std::int64_t, std::int64_t k) {
#if defined(__AMX_BF16__)
  if (type == Type::b16) return amx_work_floats(k);
#endif
  (void)type;
  (void)k;
  return dot_work_floats(rows);
}

template <class T>
void run_fast(const LinearCall& c, Range rows, Range outputs, float* work) {
  if (rows.size() > kFewRows) return multiply_tiles<T>(c, rows, outputs, work);
  using S = typename FewStepOf<T>::type;
  using X = typename S::X;
  const std::int64_t stride = round_up(c.k, kFewUnit);
  X* x = reinterpret_cast<X*>(work);
  for (std::int64_t row = 0; row < rows.size(); ++row)
    arrange_row<S>(static_cast<const X*>(c.x) + (rows.first + row) * c.x_stride, c.k, stride,
                   x + row * stride);
  multiply_few<T>(c, x, stride, rows, outputs);
}

std::int64_t work_floats_fast(Type, std::int64_t rows, std::int64_t outputs, std::int64_t k) {
  if (rows <= kFewRows) return rows * round_up(k, kFewUnit);
  return kDepth * kTileColumns + rows * round_up(outputs, kTileColumns);
}

#if defined(MILLRACE_PAIR_LINEARS)
using Prepared = bf16;
#else
using Prepared = float;
#endif

// A line more than the row: rows a power of two apart would share their places in the cache.
std::int64_t prepared_stride(Type, std::int64_t k) { return round_up(k, 32) + 16; }

std::int64_t prepared_bytes(Type type, std::int64_t k) {
  return type == Type::f32 ? 0 : prepared_stride(type, k) * static_cast<std::int64_t>(sizeof(Prepared));
}

// To floats, or where pairs are multiplied to rows that end in a whole pair.
void prepare_bf16(const void* source, std::int64_t stride, std::int64_t rows, std::int64_t k,
                  void* target) {
  const bf16* x = static_cast<const bf16*>(source);
  Prepared* to = static_cast<Prepared*>(target);
  for (std::int64_t row = 0; row < rows; ++row, x += stride, to += prepared_stride(Type::b16, k)) {
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

constexpr LinearKernels kFastLinear = {
    __INT64_MAX__,
    prepared_bytes,
    prepared_stride,
    {nullptr, prepare_bf16},
    work_floats_fast,
    {run_fast<float>, run_fast<bf16>},
    {weighted_sum<float>, weighted_sum<bf16>},
};

constexpr LinearKernels kAlikeLinear = {
    262144,
#if defined(__AMX_BF16__)
    prepared_bytes_amx,
    prepared_stride_amx,
    {prepare_arranged<float>, prepare_amx},
#else
    arranged_bytes,
    arranged_stride,
    {prepare_arranged<float>, prepare_arranged<bf16>},
#endif
    work_floats_alike,
    {run_alike<float>, run_alike<bf16>},
    {weighted_sum<float>, weighted_sum<bf16>},
};

}  // namespace linears

using linears::kAlikeLinear;
using linears::kFastLinear;
