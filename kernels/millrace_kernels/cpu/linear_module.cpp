// Linears: splits the outputs over the pool.

#include "bindings.hpp"

namespace millrace {
namespace {

constexpr std::int64_t kTaskWeights = 32768;

void linear(Type type, Address x, std::int64_t x_stride, int m, std::int64_t k, Address weight,
            Address bias, std::int64_t o, Address out, int threads) {
  const nb::gil_scoped_release release;
  const LinearKernels& table = kernels().linear;
  const int kind = static_cast<int>(type);
  float* packed = scratch((table.packed_bytes(type, m, k) + 3) / 4);
  table.pack_x[kind](at<const void>(x), x_stride, m, k, packed);
  const LinearCall call{packed, at<const void>(weight), at<const void>(bias), at<void>(out), k, o, m};
  const std::int64_t step =
      std::max<std::int64_t>(8, kTaskWeights / std::max<std::int64_t>(k, 1) / 8 * 8);
  const auto task = [&](int index) {
    const std::int64_t first = index * step;
    table.run[kind](call, first, std::min(first + step, o));
  };
  parallel_for(static_cast<int>((o + step - 1) / step), threads, task);
}

}  // namespace

void bind_linear(nb::module_& m) {
  using namespace nb::literals;
  m.def("linear", &linear, "type"_a, "x"_a, "x_stride"_a, "m"_a, "k"_a, "weight"_a, "bias"_a,
        "o"_a, "out"_a, "threads"_a);
}

}  // namespace millrace
