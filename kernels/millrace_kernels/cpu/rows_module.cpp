// What works row by row: splits the rows over the pool.

#include <cstring>
#include <stdexcept>
#include <string>

#include "bindings.hpp"

namespace millrace {
namespace {

constexpr std::int64_t kTaskElements = 16384;

// body(first, last) over [0, rows), in tasks of about kTaskElements elements.
template <class Body>
void over_rows(std::int64_t rows, std::int64_t width, int threads, Body body) {
  const GilPause pause(rows * width);
  const std::int64_t step = std::max<std::int64_t>(1, kTaskElements / std::max<std::int64_t>(width, 1));
  const auto task = [&](int index) {
    const std::int64_t first = index * step;
    body(first, std::min(first + step, rows));
  };
  parallel_for(static_cast<int>((rows + step - 1) / step), threads, task);
}

void rms_norm(Type type, Address x, std::int64_t x_stride, Address residual, Address total,
              Address weight, Address out, std::int64_t rows, std::int64_t width, float eps,
              int threads) {
  const auto kernel = kernels().rows.rms_norm[static_cast<int>(type)];
  over_rows(rows, width, threads, [&](std::int64_t first, std::int64_t last) {
    kernel(at<const void>(x), x_stride, at<const void>(residual), at<void>(total),
           at<const void>(weight), at<void>(out), first, last, width, eps);
  });
}

void silu_mul(Type type, Address gate_up, Address out, std::int64_t rows, std::int64_t width,
              int threads) {
  const auto kernel = kernels().rows.silu_mul[static_cast<int>(type)];
  over_rows(rows, width, threads, [&](std::int64_t first, std::int64_t last) {
    kernel(at<const void>(gate_up), at<void>(out), first, last, width);
  });
}

void rope(Type type, Address x, std::int64_t stride_n, int heads, int head_dim, Address cos,
          Address sin, std::int64_t rows, int threads) {
  const auto kernel = kernels().rows.rope[static_cast<int>(type)];
  over_rows(rows, heads * head_dim, threads, [&](std::int64_t first, std::int64_t last) {
    kernel(at<void>(x), stride_n, heads, head_dim, at<const float>(cos), at<const float>(sin),
           first, last);
  });
}

// Strides and head_dim in bytes but page_tokens and heads counted.
void write_kv(Address kv, std::int64_t num_pages, int kv_heads, int page_tokens,
              std::int64_t row_bytes, Address k, std::int64_t k_stride, Address v,
              std::int64_t v_stride, Address slots, std::int64_t rows, int threads) {
  const auto* slot = at<const std::int64_t>(slots);
  for (std::int64_t n = 0; n < rows; ++n)
    if (slot[n] < 0 || slot[n] >= num_pages * page_tokens)
      throw std::out_of_range("slot " + std::to_string(slot[n]) + " is outside the pool");
  const std::int64_t head_bytes = page_tokens * row_bytes;
  const auto copy = [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t n = first; n < last; ++n) {
      char* to = at<char>(kv) + slot[n] / page_tokens * 2 * kv_heads * head_bytes +
                 slot[n] % page_tokens * row_bytes;
      for (int h = 0; h < kv_heads; ++h, to += head_bytes) {
        std::memcpy(to, at<const char>(k) + n * k_stride + h * row_bytes, row_bytes);
        std::memcpy(to + kv_heads * head_bytes, at<const char>(v) + n * v_stride + h * row_bytes,
                    row_bytes);
      }
    }
  };
  over_rows(rows, kv_heads * row_bytes / 2, threads, copy);
}

}  // namespace

void bind_rows(nb::module_& m) {
  using namespace nb::literals;
  m.def("rms_norm", &rms_norm, "type"_a, "x"_a, "x_stride"_a, "residual"_a, "total"_a, "weight"_a,
        "out"_a, "rows"_a, "width"_a, "eps"_a, "threads"_a);
  m.def("silu_mul", &silu_mul, "type"_a, "gate_up"_a, "out"_a, "rows"_a, "width"_a, "threads"_a);
  m.def("rope", &rope, "type"_a, "x"_a, "stride_n"_a, "heads"_a, "head_dim"_a, "cos"_a, "sin"_a,
        "rows"_a, "threads"_a);
  m.def("write_kv", &write_kv, "kv"_a, "num_pages"_a, "kv_heads"_a, "page_tokens"_a,
        "row_bytes"_a, "k"_a, "k_stride"_a, "v"_a, "v_stride"_a, "slots"_a, "rows"_a, "threads"_a);
}

}  // namespace millrace
