// What the parts of the Python module share. Tensors come as addresses; the Python side has checked
// types and shapes.

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels.hpp"
#include "pool.hpp"

namespace millrace {

namespace nb = nanobind;

using Address = std::uintptr_t;

constexpr std::int64_t kReleaseElements = 65536;  // below this, letting go of the GIL costs more

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// Grows and stays: kernels run too often to allocate.
inline float* scratch(std::int64_t floats) {
  thread_local std::vector<float> buffer;
  if (buffer.size() < static_cast<std::size_t>(floats)) buffer.resize(floats);
  return buffer.data();
}

class GilPause {
 public:
  explicit GilPause(std::int64_t elements) {
    if (elements >= kReleaseElements) release_.emplace();
  }

 private:
  std::optional<nb::gil_scoped_release> release_;
};

constexpr std::int64_t kTaskElements = 16384;

// body(first, last) over [0, rows), in tasks of about kTaskElements elements; in the caller alone
// where one task is all.
template <class Body>
void over_rows(std::int64_t rows, std::int64_t width, int threads, const Body& body) {
  const std::int64_t step = std::max<std::int64_t>(1, kTaskElements / std::max<std::int64_t>(width, 1));
  parallel_for(static_cast<int>((rows + step - 1) / step), threads, [&](int index) {
    body(index * step, std::min((index + 1) * step, rows));
  });
}

// Each registers its part of the module.
void bind_isa(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_linear(nb::module_& m);
void bind_rows(nb::module_& m);
void bind_sampling(nb::module_& m);

}  // namespace millrace
