// The Python module `millrace_kernels._cpu`: checks, splits work over the pool, picks the
// instruction set. Tensors come as addresses; cpu_backend.py has checked types and shapes.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.hpp"
#include "pool.hpp"

namespace nb = nanobind;

namespace millrace {
namespace {

using Address = std::uintptr_t;

constexpr std::int64_t kTaskElements = 16384;    // of a row-wise kernel
constexpr std::int64_t kTaskWeights = 32768;     // of a linear
constexpr std::int64_t kReleaseElements = 65536;  // below this, letting go of the GIL costs more

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> tables;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) tables.push_back(&avx512_bf16_kernels());
  if (avx512) tables.push_back(&avx512_kernels());
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    tables.push_back(&avx2_kernels());
#endif
  tables.push_back(&portable_kernels());
  return tables;
}

const Kernels* g_kernels = available().front();

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* table : available()) names.emplace_back(table->name);
  return names;
}

void use_instruction_set(const std::string& name) {
  for (const Kernels* table : available())
    if (name == table->name) {
      g_kernels = table;
      return;
    }
  throw std::invalid_argument("no instruction set " + name + " on this machine");
}

std::string instruction_set() { return g_kernels->name; }

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// Grows and stays: kernels run too often to allocate.
float* scratch(std::int64_t floats) {
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

// Which (rows, kv head, span of K/V) make up one step's attention; serves every layer of the step.
// Only sequences with at most max_rows rows of q are taken; the caller sees to the others.
class AttentionPlan {
 public:
  AttentionPlan(Address q_indptr, Address kv_lens, Address page_table, int batch, int max_pages,
                int page_tokens, int q_heads, int kv_heads, int head_dim, int window, int max_rows)
      : kernels_(*g_kernels),
        pages_(at<const std::int32_t>(page_table),
               at<const std::int32_t>(page_table) + static_cast<std::size_t>(batch) * max_pages) {
    call_.q_heads = q_heads;
    call_.kv_heads = kv_heads;
    call_.head_dim = head_dim;
    call_.page_tokens = page_tokens;
    call_.window = window;
    const int group = q_heads / kv_heads;
    const auto* starts = at<const std::int32_t>(q_indptr);
    const auto* lengths = at<const std::int32_t>(kv_lens);
    int most_rows = 1;
    for (int i = 0; i < batch; ++i)
      if (starts[i + 1] - starts[i] <= max_rows)
        most_rows = std::max(most_rows, starts[i + 1] - starts[i]);
    const int tile_rows = std::clamp(kMaxLanes / group, 1, most_rows);
    lanes_ = tile_rows * group;
    partial_stride_ = kernels_.attention_partial(lanes_, head_dim);
    for (int i = 0; i < batch; ++i) {
      const int rows = starts[i + 1] - starts[i];
      if (rows < 1 || rows > max_rows) continue;
      const std::int32_t* pages = pages_.data() + static_cast<std::size_t>(i) * max_pages;
      check_pages(pages, (lengths[i] + page_tokens - 1) / page_tokens);
      for (int row = 0; row < rows; row += tile_rows)
        add_tiles(pages, starts[i] + row, std::min(tile_rows, rows - row),
                  lengths[i] - rows + row);
    }
    pending_ = std::make_unique<std::atomic<int>[]>(tiles_.size());
    for (std::size_t i = 0; i < tiles_.size(); ++i) pending_[i] = tasks_[tiles_[i]].splits;
  }

  void run(Type type, Address q, Address out, Address lse, Address kv, std::int64_t q_stride_n,
           std::int64_t q_stride_h, std::int64_t num_pages, float scale, int threads) {
    if (last_page_ >= num_pages)
      throw std::out_of_range("page " + std::to_string(last_page_) + " is past the pool's " +
                              std::to_string(num_pages));
    const nb::gil_scoped_release release;
    AttentionCall call = call_;
    call.q = at<const void>(q);
    call.out = at<void>(out);
    call.lse = at<float>(lse);
    call.kv = at<const void>(kv);
    call.q_stride_n = q_stride_n;
    call.q_stride_h = q_stride_h;
    call.scale = scale;
    partials_.resize(static_cast<std::size_t>(partial_stride_ * partial_count_));
    const int kind = static_cast<int>(type);
    const auto task = [&](int index) {
      const AttentionTask& one = tasks_[index];
      float* space = scratch(kernels_.attention_scratch(lanes_, call.head_dim));
      kernels_.attention[kind](call, one, space, partials_.data());
      if (one.splits == 1 || pending_[one.tile].fetch_sub(1) != 1) return;
      pending_[one.tile] = one.splits;  // ready for the next layer
      kernels_.attention_merge[kind](call, tasks_[tiles_[one.tile]], partials_.data(),
                                     partial_stride_);
    };
    parallel_for(static_cast<int>(tasks_.size()), threads, task);
  }

 private:
  void check_pages(const std::int32_t* pages, int count) {
    for (int i = 0; i < count; ++i) {
      if (pages[i] < 0) throw std::out_of_range("page_table names page " + std::to_string(pages[i]));
      last_page_ = std::max(last_page_, pages[i]);
    }
  }

  // A tile for each kv head, cut at positions that are multiples of kSplit.
  void add_tiles(const std::int32_t* pages, int first_row, int rows, int first_position) {
    const int end = std::max(first_position + rows, 0);
    const int begin = call_.window ? std::max(first_position - call_.window + 1, 0) : 0;
    const int splits = std::max((end + kSplit - 1) / kSplit - begin / kSplit, 1);
    for (int head = 0; head < call_.kv_heads; ++head) {
      const int tile = static_cast<int>(tiles_.size());
      tiles_.push_back(static_cast<int>(tasks_.size()));
      for (int split = 0; split < splits; ++split) {
        const int edge = (begin / kSplit + split) * kSplit;
        const std::int64_t partial = splits == 1 ? 0 : partial_stride_ * partial_count_++;
        tasks_.push_back({pages, partial, tile, splits, first_row, rows, first_position, head,
                          std::max(edge, begin), std::min(edge + kSplit, end)});
      }
    }
  }

  const Kernels& kernels_;
  std::vector<std::int32_t> pages_;
  AttentionCall call_{};
  int lanes_ = 0;
  std::int32_t last_page_ = -1;
  std::int64_t partial_stride_ = 0;
  std::int64_t partial_count_ = 0;
  std::vector<AttentionTask> tasks_;
  std::vector<int> tiles_;  // first task of each tile
  std::unique_ptr<std::atomic<int>[]> pending_;
  std::vector<float> partials_;
};

void linear(Type type, Address x, std::int64_t x_stride, int m, std::int64_t k, Address weight,
            Address bias, std::int64_t o, Address out, int threads) {
  const nb::gil_scoped_release release;
  const Kernels& kernels = *g_kernels;
  const int kind = static_cast<int>(type);
  float* packed = scratch((kernels.packed_bytes(type, m, k) + 3) / 4);
  kernels.pack_x[kind](at<const void>(x), x_stride, m, k, packed);
  const LinearCall call{packed, at<const void>(weight), at<const void>(bias), at<void>(out), k, o, m};
  const std::int64_t step =
      std::max<std::int64_t>(8, kTaskWeights / std::max<std::int64_t>(k, 1) / 8 * 8);
  const auto task = [&](int index) {
    const std::int64_t first = index * step;
    kernels.linear[kind](call, first, std::min(first + step, o));
  };
  parallel_for(static_cast<int>((o + step - 1) / step), threads, task);
}

void rms_norm(Type type, Address x, std::int64_t x_stride, Address residual, Address total,
              Address weight, Address out, std::int64_t rows, std::int64_t width, float eps,
              int threads) {
  const auto kernel = g_kernels->rms_norm[static_cast<int>(type)];
  over_rows(rows, width, threads, [&](std::int64_t first, std::int64_t last) {
    kernel(at<const void>(x), x_stride, at<const void>(residual), at<void>(total),
           at<const void>(weight), at<void>(out), first, last, width, eps);
  });
}

void silu_mul(Type type, Address gate_up, Address out, std::int64_t rows, std::int64_t width,
              int threads) {
  const auto kernel = g_kernels->silu_mul[static_cast<int>(type)];
  over_rows(rows, width, threads, [&](std::int64_t first, std::int64_t last) {
    kernel(at<const void>(gate_up), at<void>(out), first, last, width);
  });
}

void rope(Type type, Address x, std::int64_t stride_n, int heads, int head_dim, Address cos,
          Address sin, std::int64_t rows, int threads) {
  const auto kernel = g_kernels->rope[static_cast<int>(type)];
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
}  // namespace millrace

NB_MODULE(_cpu, m) {
  using namespace millrace;
  using namespace nb::literals;
  m.doc() = "CPU kernels over raw addresses; call them through millrace_kernels.cpu_backend.";
  nb::enum_<Type>(m, "Type").value("F32", Type::f32).value("BF16", Type::b16);
  m.def("instruction_sets", &instruction_sets, "Those that this machine runs, fastest first.");
  m.def("instruction_set", &instruction_set, "The one in use.");
  m.def("use_instruction_set", &use_instruction_set, "name"_a,
        "Take another; raises ValueError when this machine lacks it.");
  nb::class_<AttentionPlan>(m, "AttentionPlan")
      .def(nb::init<Address, Address, Address, int, int, int, int, int, int, int, int>(),
           "q_indptr"_a, "kv_lens"_a, "page_table"_a, "batch"_a, "max_pages"_a, "page_tokens"_a,
           "q_heads"_a, "kv_heads"_a, "head_dim"_a, "window"_a, "max_rows"_a)
      .def("run", &AttentionPlan::run, "type"_a, "q"_a, "out"_a, "lse"_a, "kv"_a, "q_stride_n"_a,
           "q_stride_h"_a, "num_pages"_a, "scale"_a, "threads"_a);
  m.def("linear", &linear, "type"_a, "x"_a, "x_stride"_a, "m"_a, "k"_a, "weight"_a, "bias"_a,
        "o"_a, "out"_a, "threads"_a);
  m.def("rms_norm", &rms_norm, "type"_a, "x"_a, "x_stride"_a, "residual"_a, "total"_a, "weight"_a,
        "out"_a, "rows"_a, "width"_a, "eps"_a, "threads"_a);
  m.def("silu_mul", &silu_mul, "type"_a, "gate_up"_a, "out"_a, "rows"_a, "width"_a, "threads"_a);
  m.def("rope", &rope, "type"_a, "x"_a, "stride_n"_a, "heads"_a, "head_dim"_a, "cos"_a, "sin"_a,
        "rows"_a, "threads"_a);
  m.def("write_kv", &write_kv, "kv"_a, "num_pages"_a, "kv_heads"_a, "page_tokens"_a,
        "row_bytes"_a, "k"_a, "k_stride"_a, "v"_a, "v_stride"_a, "slots"_a, "rows"_a, "threads"_a);
}
