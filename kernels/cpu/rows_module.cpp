// What works row by row: splits the rows over the pool.

#include <stdexcept>
#include <string>

#include "bindings.hpp"

namespace millrace {
namespace {

void rms_norm(Type type, Address x, std::int64_t x_stride, Address residual, Address total,
              Address weight, Address out, std::int64_t rows, std::int64_t width, float eps,
              int threads) {
  const auto kernel = kernels().rows.rms_norm[static_cast<int>(type)];
  const GilPause pause(rows * width);
  over_rows(rows, width, threads, [&](std::int64_t first, std::int64_t last) {
    kernel(at<const void>(x), x_stride, at<const void>(residual), at<void>(total),
           at<const void>(weight), at<void>(out), first, last, width, eps);
  });
}

void silu_mul(Type type, Address gate_up, Address out, std::int64_t rows, std::int64_t width,
              int threads) {
  const auto kernel = kernels().rows.silu_mul[static_cast<int>(type)];
  const GilPause pause(rows * width);
  over_rows(rows, width, threads, [&](std::int64_t first, std::int64_t last) {
    kernel(at<const void>(gate_up), at<void>(out), first, last, width);
  });
}

void rope_write_kv(Type type, Address qkv, std::int64_t rows, int q_heads, int kv_heads,
                   int head_dim, Address cos, Address sin, Address q_norm, Address k_norm,
                   float eps, Address kv, std::int64_t num_pages, std::int64_t page_tokens,
                   Address slots, int threads) {
  const RopeWrite call{at<void>(qkv),          at<const float>(cos),
                       at<const float>(sin),   at<const void>(q_norm),
                       at<const void>(k_norm), at<void>(kv),
                       at<const std::int64_t>(slots), page_tokens,
                       q_heads, kv_heads, head_dim, eps};
  for (std::int64_t n = 0; n < rows; ++n)
    if (call.slots[n] < 0 || call.slots[n] >= num_pages * page_tokens)
      throw std::out_of_range("slot " + std::to_string(call.slots[n]) + " is outside the pool");
  const auto kernel = kernels().rows.rope_write_kv[static_cast<int>(type)];
  const std::int64_t width = (q_heads + 2 * kv_heads) * head_dim;
  const GilPause pause(rows * width);
  over_rows(rows, width, threads,
            [&](std::int64_t first, std::int64_t last) { kernel(call, first, last); });
}

}  // namespace

void bind_rows(nb::module_& m) {
  using namespace nb::literals;
  m.def("rms_norm", &rms_norm, "type"_a, "x"_a, "x_stride"_a, "residual"_a, "total"_a, "weight"_a,
        "out"_a, "rows"_a, "width"_a, "eps"_a, "threads"_a);
  m.def("silu_mul", &silu_mul, "type"_a, "gate_up"_a, "out"_a, "rows"_a, "width"_a, "threads"_a);
  m.def("rope_write_kv", &rope_write_kv, "type"_a, "qkv"_a, "rows"_a, "q_heads"_a, "kv_heads"_a,
        "head_dim"_a, "cos"_a, "sin"_a, "q_norm"_a, "k_norm"_a, "eps"_a, "kv"_a, "num_pages"_a,
        "page_tokens"_a, "slots"_a, "threads"_a);
}

}  // namespace millrace
