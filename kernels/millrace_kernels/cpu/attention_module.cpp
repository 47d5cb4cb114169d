// Paged attention: plans a step, then splits its work over the pool.

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>

#include "bindings.hpp"

namespace millrace {
namespace {

// Which (rows, kv head, span of K/V) make up one step's attention; serves every layer of the step.
// Only sequences with at most max_rows rows of q are taken; the caller sees to the others.
class AttentionPlan {
 public:
  AttentionPlan(Address q_indptr, Address kv_lens, Address page_table, int batch, int max_pages,
                int page_tokens, int q_heads, int kv_heads, int head_dim, int window, int max_rows)
      : kernels_(kernels().attention),
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
    partial_stride_ = kernels_.partial(lanes_, head_dim);
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
      float* space = scratch(kernels_.scratch(lanes_, call.head_dim));
      kernels_.attend[kind](call, one, space, partials_.data());
      if (one.splits == 1 || pending_[one.tile].fetch_sub(1) != 1) return;
      pending_[one.tile] = one.splits;  // ready for the next layer
      kernels_.merge[kind](call, tasks_[tiles_[one.tile]], partials_.data(),
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

  const AttentionKernels& kernels_;
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

}  // namespace

void bind_attention(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<AttentionPlan>(m, "AttentionPlan")
      .def(nb::init<Address, Address, Address, int, int, int, int, int, int, int, int>(),
           "q_indptr"_a, "kv_lens"_a, "page_table"_a, "batch"_a, "max_pages"_a, "page_tokens"_a,
           "q_heads"_a, "kv_heads"_a, "head_dim"_a, "window"_a, "max_rows"_a)
      .def("run", &AttentionPlan::run, "type"_a, "q"_a, "out"_a, "lse"_a, "kv"_a, "q_stride_n"_a,
           "q_stride_h"_a, "num_pages"_a, "scale"_a, "threads"_a);
}

}  // namespace millrace
