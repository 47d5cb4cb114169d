// Paged attention: plans a step, then splits its work over the pool.

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>

#include "bindings.hpp"

namespace millrace {
namespace {

constexpr std::int64_t kRowsAtOnce = 1024;  // rows of results that one thread joins at a time

// A tile with more than such a share of a step's work has its spans of K/V run as tasks of their own.
// How a step is cut into tasks changes no bit of its results.
constexpr int kTasksWanted = 64;
constexpr std::int64_t kPartialFloats = 1 << 24;  // that the partial results of a step may take

// Which (rows, kv heads, span of K/V) make up one step's attention; serves every layer of the step.
// The page table and the positions are read where they lie: the caller keeps them.
class AttentionPlan {
 public:
  AttentionPlan(Address q_indptr, Address kv_lens, Address page_table, int batch, int max_pages,
                int page_tokens, int q_heads, int kv_heads, int head_dim, Address q_positions,
                Address kv_positions, bool causal, int window, float soft_cap)
      : kernels_(kernels().attention),
        starts_(at<const std::int32_t>(q_indptr)),
        lengths_(at<const std::int32_t>(kv_lens)),
        pages_(at<const std::int32_t>(page_table)),
        q_at_(at<const std::int32_t>(q_positions)),
        kv_at_(at<const std::int32_t>(kv_positions)),
        batch_(batch),
        max_pages_(max_pages) {
    call_.q_heads = q_heads;
    call_.kv_heads = kv_heads;
    call_.head_dim = head_dim;
    call_.page_tokens = page_tokens;
    call_.causal = causal;
    call_.window = window;
    call_.soft_cap = soft_cap;
  }

  // Plans what the tables hold now; again whenever they have changed.
  void prepare() {
    tiles_.clear();
    partial_floats_ = 0;
    tasks_ = 0;
    last_page_ = -1;
    const std::int32_t* q_at = q_at_;
    const std::int32_t* kv_at = kv_at_;
    for (int i = 0; i < batch_; ++i) {
      const int rows = starts_[i + 1] - starts_[i];
      const int length = lengths_[i];
      check_length(i, rows, length);
      if (rows >= 1) {
        AttentionTask whole{};
        whole.pages = pages_ + static_cast<std::size_t>(i) * max_pages_;
        whole.q_positions = q_at ? q_at + starts_[i] : nullptr;
        whole.kv_positions = kv_at;
        whole.first_row = starts_[i];
        whole.rows = rows;
        whole.first_position = length - rows;
        whole.end = length;
        check_pages(whole.pages, (length + call_.page_tokens - 1) / call_.page_tokens);
        add_sequence(whole);
      }
      if (kv_at) kv_at += length;
    }
    cut_tiles();
    // The longest first: none is then left to run alone at the end.
    std::stable_sort(tiles_.begin(), tiles_.end(),
                     [](const Tile& a, const Tile& b) { return a.cost > b.cost; });
    if (tiles_.size() > pending_room_) {
      pending_room_ = tiles_.size();
      pending_ = std::make_unique<std::atomic<int>[]>(pending_room_);
    }
    for (std::size_t i = 0; i < tiles_.size(); ++i) {
      tiles_[i].first_task = tasks_;
      tasks_ += tiles_[i].splits;
      pending_[i] = tiles_[i].splits;
    }
  }

  void run(Type type, Address q, Address out, bool float_out, Address lse, Address kv,
           std::int64_t q_stride_n, std::int64_t q_stride_h, std::int64_t num_pages, float scale,
           int threads) {
    if (last_page_ >= num_pages)
      throw std::out_of_range("page " + std::to_string(last_page_) + " is past the pool's " +
                              std::to_string(num_pages));
    const nb::gil_scoped_release release;
    AttentionCall call = call_;
    call.q = at<const void>(q);
    call.out = at<void>(out);
    call.float_out = float_out;
    call.lse = at<float>(lse);
    call.kv = at<const void>(kv);
    call.q_stride_n = q_stride_n;
    call.q_stride_h = q_stride_h;
    call.scale = scale;
    partials_.resize(static_cast<std::size_t>(partial_floats_));
    const int kind = static_cast<int>(type);
    const auto body = [&](int index) {
      const auto next = std::upper_bound(
          tiles_.begin(), tiles_.end(), index,
          [](int wanted, const Tile& tile) { return wanted < tile.first_task; });
      const Tile& tile = next[-1];
      AttentionTask task = task_of(tile, index - tile.first_task);
      float* space = scratch(kernels_.scratch[tile.few](lanes_of(task), call.head_dim));
      kernels_.attend[tile.few][kind](call, task, space);
      std::atomic<int>& pending = pending_[static_cast<std::size_t>(&tile - tiles_.data())];
      if (tile.splits == 1 || pending.fetch_sub(1) != 1) return;
      pending = tile.splits;  // ready for the next layer
      task.partial = partials_.data() + tile.partial;
      kernels_.merge[kind](call, task, tile.splits, tile.partial_stride);
    };
    parallel_for(tasks_, threads, body);
  }

 private:
  // Rows of one sequence for some kv heads: one task, or one for each span of its K/V.
  struct Tile {
    AttentionTask whole;
    bool few;
    int splits;
    int first_task;
    std::int64_t partial;  // first float of the first partial result, when there are several
    std::int64_t partial_stride;
    std::int64_t cost;
  };

  AttentionTask task_of(const Tile& tile, int split) {
    AttentionTask task = tile.whole;
    if (tile.splits == 1) return task;
    for (int i = 0; i < split; ++i) task.begin = span_end(task.begin);
    task.end = std::min(task.end, span_end(task.begin));
    task.partial = partials_.data() + tile.partial + split * tile.partial_stride;
    return task;
  }

  int lanes_of(const AttentionTask& task) const {
    return task.heads * task.rows * (call_.q_heads / call_.kv_heads);
  }

  void check_length(int sequence, int rows, int length) const {
    const std::int64_t room = static_cast<std::int64_t>(max_pages_) * call_.page_tokens;
    if (length < 0 || length > room || (!q_at_ && length && rows > length))
      throw std::invalid_argument("kv_lens[" + std::to_string(sequence) + "] = " +
                                  std::to_string(length) + " does not fit " +
                                  std::to_string(rows) + " rows and room for " +
                                  std::to_string(room));
  }

  void check_pages(const std::int32_t* pages, int count) {
    std::int32_t lowest = 0, highest = -1;
    for (int i = 0; i < count; ++i) {
      lowest = std::min(lowest, pages[i]);
      highest = std::max(highest, pages[i]);
    }
    if (lowest < 0) throw std::out_of_range("page_table names page " + std::to_string(lowest));
    last_page_ = std::max(last_page_, highest);
  }

  void add_sequence(const AttentionTask& whole) {
    const int group = call_.q_heads / call_.kv_heads;
    const bool few = !rows_are_alike() && static_cast<std::int64_t>(whole.rows) * group <= kFewLanes;
    const int heads = few ? std::clamp(kFewElements / call_.head_dim, 1, call_.kv_heads) : 1;
    const int tile_rows = std::clamp(kTileLanes / group, 1, whole.rows);
    for (int row = 0; row < whole.rows; row += tile_rows) {
      AttentionTask task = whole;
      task.first_row += row;
      task.rows = std::min(tile_rows, whole.rows - row);
      task.first_position += row;
      if (task.q_positions) task.q_positions += row;
      clip(task);
      for (int head = 0; head < call_.kv_heads; head += heads) {
        Tile tile{task, few, 1, 0, 0, 0, 0};
        tile.whole.kv_head = head;
        tile.whole.heads = std::min(heads, call_.kv_heads - head);
        tile.cost = static_cast<std::int64_t>(lanes_of(tile.whole)) * (task.end - task.begin);
        tiles_.push_back(tile);
      }
    }
  }

  // Gives the spans of the tiles with much work to tasks of their own.
  void cut_tiles() {
    std::int64_t cost = 0;
    for (const Tile& tile : tiles_) cost += tile.cost;
    for (Tile& tile : tiles_) {
      if (tile.cost * kTasksWanted <= cost) continue;
      int spans = 0;
      for (int slot = tile.whole.begin; slot < tile.whole.end; slot = span_end(slot)) ++spans;
      const std::int64_t stride = kernels_.partial(lanes_of(tile.whole), call_.head_dim);
      if (spans < 2 || partial_floats_ + spans * stride > kPartialFloats) continue;
      tile.splits = spans;
      tile.partial_stride = stride;
      tile.partial = partial_floats_;
      partial_floats_ += spans * stride;
    }
  }

  // Leaves out the ends of K/V that no row sees, where slots stand for positions.
  void clip(AttentionTask& task) const {
    if (task.kv_positions) return;
    int first = task.first_position;
    int last = first + task.rows - 1;
    if (task.q_positions) {
      const auto [low, high] =
          std::minmax_element(task.q_positions, task.q_positions + task.rows);
      first = *low;
      last = *high;
    }
    if (call_.causal) task.end = std::clamp(last + 1, 0, task.end);
    if (call_.window)
      task.begin = std::clamp(first - call_.window + 1, 0, task.end) / kSlotUnit * kSlotUnit;
  }

  const AttentionKernels& kernels_;
  const std::int32_t *starts_, *lengths_, *pages_, *q_at_, *kv_at_;
  int batch_, max_pages_;
  AttentionCall call_{};
  std::int32_t last_page_ = -1;
  std::int64_t partial_floats_ = 0;
  int tasks_ = 0;
  std::vector<Tile> tiles_;
  std::size_t pending_room_ = 0;
  std::unique_ptr<std::atomic<int>[]> pending_;
  std::vector<float> partials_;
};

void merge_attention(Type type, Address out, Address lse, Type other_type, Address other,
                     Address other_lse, std::int64_t rows, int head_dim, int threads) {
  const GilPause pause(rows * head_dim);
  const auto join = kernels().attention.join[static_cast<int>(type)][static_cast<int>(other_type)];
  const std::int64_t size = (type == Type::f32 ? 4 : 2) * head_dim;
  const std::int64_t other_size = (other_type == Type::f32 ? 4 : 2) * head_dim;
  const auto body = [&](int index) {
    const std::int64_t first = index * kRowsAtOnce;
    join(at<char>(out) + first * size, at<float>(lse) + first,
         at<const char>(other) + first * other_size, at<const float>(other_lse) + first,
         std::min(kRowsAtOnce, rows - first), head_dim);
  };
  parallel_for(static_cast<int>((rows + kRowsAtOnce - 1) / kRowsAtOnce), threads, body);
}

}  // namespace

void bind_attention(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<AttentionPlan>(m, "AttentionPlan")
      .def(nb::init<Address, Address, Address, int, int, int, int, int, int, Address, Address, bool,
                    int, float>(),
           "q_indptr"_a, "kv_lens"_a, "page_table"_a, "batch"_a, "max_pages"_a, "page_tokens"_a,
           "q_heads"_a, "kv_heads"_a, "head_dim"_a, "q_positions"_a, "kv_positions"_a, "causal"_a,
           "window"_a, "soft_cap"_a)
      .def("prepare", &AttentionPlan::prepare)
      .def("run", &AttentionPlan::run, "type"_a, "q"_a, "out"_a, "float_out"_a, "lse"_a, "kv"_a,
           "q_stride_n"_a, "q_stride_h"_a, "num_pages"_a, "scale"_a, "threads"_a);
  m.def("merge_attention", &merge_attention, "type"_a, "out"_a, "lse"_a, "other_type"_a, "other"_a,
        "other_lse"_a, "rows"_a, "head_dim"_a, "threads"_a);
}

}  // namespace millrace
