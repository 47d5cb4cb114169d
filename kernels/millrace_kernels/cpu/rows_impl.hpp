// What works row by row: norms, activations, rotary embedding. Included by kernels_impl.hpp.

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

constexpr RowKernels kRows = {
    {rms_norm<float>, rms_norm<bf16>},
    {silu_mul<float>, silu_mul<bf16>},
    {rope<float>, rope<bf16>},
};
