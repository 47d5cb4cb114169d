// What works row by row: norms, activations, rotary embedding. Included by kernels_impl.hpp.

// out = weight * (row / its root mean square), rounded to T before the weight; out may be row itself.
template <class T>
inline void norm_row(const T* row, const T* weight, T* out, std::int64_t width, float eps) {
  const std::int64_t full = width / Vec::N * Vec::N;
  const int rest = static_cast<int>(width - full);
  Vec squares[4] = {zero(), zero(), zero(), zero()};
  std::int64_t j = 0;
  for (; j + 4 * Vec::N <= full; j += 4 * Vec::N) {
    MILLRACE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const Vec a = load(row + j + i * Vec::N);
      squares[i] = fma(a, a, squares[i]);
    }
  }
  for (; j < full; j += Vec::N) {
    const Vec a = load(row + j);
    squares[0] = fma(a, a, squares[0]);
  }
  if (rest) {
    const Vec a = load_part(row + full, rest);
    squares[1] = fma(a, a, squares[1]);
  }
  const float sum_squares = sum(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
  const Vec inverse = set1(1.0f / __builtin_sqrtf(sum_squares / static_cast<float>(width) + eps));
  for (j = 0; j < full; j += Vec::N)
    store(out + j, mul(load(weight + j), rounded_as(mul(load(row + j), inverse), out)));
  if (rest)
    store_part(out + full,
               mul(load_part(weight + full, rest),
                   rounded_as(mul(load_part(row + full, rest), inverse), out)),
               rest);
}

template <class T>
inline void add_row(const T* a, const T* b, T* out, std::int64_t width) {
  const std::int64_t full = width / Vec::N * Vec::N;
  const int rest = static_cast<int>(width - full);
  for (std::int64_t j = 0; j < full; j += Vec::N) store(out + j, add(load(a + j), load(b + j)));
  if (rest) store_part(out + full, add(load_part(a + full, rest), load_part(b + full, rest)), rest);
}

template <class T>
void rms_norm(const void* x, std::int64_t x_stride, const void* residual, void* total,
              const void* weight, void* out, std::int64_t first, std::int64_t last,
              std::int64_t width, float eps) {
  for (std::int64_t n = first; n < last; ++n) {
    const T* row = static_cast<const T*>(x) + n * x_stride;
    if (residual) {
      T* to = static_cast<T*>(total) + n * width;
      add_row(static_cast<const T*>(residual) + n * width, row, to, width);
      row = to;
    }
    norm_row(row, static_cast<const T*>(weight), static_cast<T*>(out) + n * width, width, eps);
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

// Half-rotation of one head by the angles of c and s [half]; out may be the head itself.
template <class T>
inline void rotate_head(const T* head, const float* c, const float* s, T* out, int half) {
  const int full = half / Vec::N * Vec::N;
  const int rest = half - full;
  for (int j = 0; j < full; j += Vec::N) {
    const Vec a = load(head + j);
    const Vec b = load(head + half + j);
    store(out + j, sub(mul(a, load(c + j)), mul(b, load(s + j))));
    store(out + half + j, add(mul(b, load(c + j)), mul(a, load(s + j))));
  }
  if (rest) {
    const Vec a = load_part(head + full, rest);
    const Vec b = load_part(head + half + full, rest);
    const Vec cc = load_part(c + full, rest);
    const Vec ss = load_part(s + full, rest);
    store_part(out + full, sub(mul(a, cc), mul(b, ss)), rest);
    store_part(out + half + full, add(mul(b, cc), mul(a, ss)), rest);
  }
}

template <class T>
inline void norm_and_rotate(const T* head, const T* weight, float eps, const float* c,
                            const float* s, T* out, int half) {
  if (weight) {
    norm_row(head, weight, out, 2 * half, eps);
    head = out;
  }
  rotate_head(head, c, s, out, half);
}

template <class T>
void rope_write_kv(const RopeWrite& call, std::int64_t first, std::int64_t last) {
  const int head_dim = call.head_dim;
  const int half = head_dim / 2;
  const std::int64_t page_head = call.page_tokens * head_dim;
  for (std::int64_t n = first; n < last; ++n) {
    const float* c = call.cos + n * half;
    const float* s = call.sin + n * half;
    T* head = static_cast<T*>(call.qkv) + n * (call.q_heads + 2 * call.kv_heads) * head_dim;
    for (int h = 0; h < call.q_heads; ++h, head += head_dim)
      norm_and_rotate(head, static_cast<const T*>(call.q_norm), call.eps, c, s, head, half);
    T* page = static_cast<T*>(call.kv) +
              call.slots[n] / call.page_tokens * 2 * call.kv_heads * page_head +
              call.slots[n] % call.page_tokens * head_dim;
    for (int h = 0; h < call.kv_heads; ++h, head += head_dim, page += page_head)
      norm_and_rotate(head, static_cast<const T*>(call.k_norm), call.eps, c, s, page, half);
    for (int h = 0; h < call.kv_heads; ++h, head += head_dim, page += page_head)
      __builtin_memcpy(page, head, head_dim * sizeof(T));
  }
}

constexpr RowKernels kRows = {
    {rms_norm<float>, rms_norm<bf16>},
    {silu_mul<float>, silu_mul<bf16>},
    {rope_write_kv<float>, rope_write_kv<bf16>},
};
