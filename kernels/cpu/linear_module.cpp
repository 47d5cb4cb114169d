// Linears and experts: prepares rows of x, then splits rows and outputs over the pool.

#include <cstring>
#include <stdexcept>
#include <string>

#include "bindings.hpp"

namespace millrace {
namespace {

constexpr std::int64_t kUnitOutputs = 64;      // a multiple of every panel's width
constexpr std::int64_t kTaskRows = 192;        // at most, a multiple of kRowBlock
constexpr std::int64_t kTaskOutputs = 256;
constexpr std::int64_t kTaskWeights = 65536;   // worth handing to another thread
constexpr std::int64_t kTasksPerThread = 4;
constexpr std::int64_t kPreparedBytes = 16 << 20;
constexpr std::int64_t kExpertRows = 4096;

enum class Use { prepared, rounded, work, inner, outer };

// Grows and stays, one for each thread and use; on a cache line's boundary.
template <Use>
void* room(std::int64_t bytes) {
  thread_local std::vector<char> buffer;
  if (buffer.size() < static_cast<std::size_t>(bytes) + 64) {
    buffer.clear();
    buffer.resize(bytes + 64);
  }
  const Address address = reinterpret_cast<Address>(buffer.data());
  return at<void>((address + 63) / 64 * 64);
}

const void* offset(const void* base, std::int64_t bytes) {
  return base ? static_cast<const char*>(base) + bytes : nullptr;
}
void* offset(void* base, std::int64_t bytes) {
  return base ? static_cast<char*>(base) + bytes : nullptr;
}

std::int64_t element_bytes(Type type) { return type == Type::f32 ? 4 : 2; }

std::int64_t parts(std::int64_t whole, std::int64_t part) { return (whole + part - 1) / part; }

std::int64_t round_to_unit(std::int64_t outputs) {
  return std::max<std::int64_t>(1, parts(outputs, kUnitOutputs)) * kUnitOutputs;
}

// Part `part` of `parts` of some rows: it begins with a block, and the parts are as equal as can be. A
// few rows left over would take the kernel for few rows, and get other bits.
Range part_of(std::int64_t rows, std::int64_t part, std::int64_t count) {
  const std::int64_t blocks = parts(rows, kRowBlock);
  return {blocks * part / count * kRowBlock,
          std::min(blocks * (part + 1) / count * kRowBlock, rows)};
}

// One product of a loop: rows and outputs that one thread multiplies.
struct Piece {
  const LinearCall* call;
  Range rows, outputs;
};

void split(const LinearKernels& table, const LinearCall& call, std::int64_t rows, int threads,
           std::vector<Piece>& pieces) {
  const std::int64_t fitting =
      table.task_inputs / std::max<std::int64_t>(call.k, 1) / kRowBlock * kRowBlock;
  const std::int64_t row_parts = parts(rows, std::clamp(fitting, 2 * kRowBlock, kTaskRows));
  const std::int64_t wanted = parts(threads * kTasksPerThread, row_parts);
  const std::int64_t least = round_to_unit(kTaskWeights / call.k);
  const std::int64_t step =
      std::clamp(round_to_unit(parts(call.o, wanted)), std::min(least, kTaskOutputs), kTaskOutputs);
  for (std::int64_t o = 0; o < call.o; o += step)
    for (std::int64_t part = 0; part < row_parts; ++part)
      pieces.push_back({&call, part_of(rows, part, row_parts), {o, std::min(o + step, call.o)}});
}

void multiply(const LinearKernels& table, Type type, const std::vector<Piece>& pieces,
              int threads) {
  const auto run = table.run[static_cast<int>(type)];
  parallel_for(static_cast<int>(pieces.size()), threads, [&](int index) {
    const Piece& piece = pieces[index];
    const std::int64_t floats = table.work_floats(
        type, piece.rows.size(), piece.outputs.size(), piece.call->k);
    run(*piece.call, piece.rows, piece.outputs, static_cast<float*>(room<Use::work>(floats * 4)));
  });
}

std::int64_t whole_blocks(std::int64_t rows) { return parts(rows, kRowBlock) * kRowBlock; }

// `over_rows` whose tasks begin with a block.
template <class Body>
void over_blocks(std::int64_t rows, std::int64_t width, int threads, const Body& body) {
  over_rows(parts(rows, kRowBlock), width * kRowBlock, threads,
            [&](std::int64_t first, std::int64_t last) {
              body(first * kRowBlock, std::min(last * kRowBlock, rows));
            });
}

// Rows of x as they are before a linear: x itself, or its norm, or its activation.
struct Rows {
  const void* x;
  std::int64_t stride;
  const void* norm_weight = nullptr;
  const void* residual = nullptr;
  void* total = nullptr;
  float eps = 0;
  bool silu = false;
};

class Linear {
 public:
  Linear(Type type, Address weight, Address bias, std::int64_t k, std::int64_t o)
      : type_(type), weight_(at<const void>(weight)), bias_(at<const void>(bias)), k_(k), o_(o) {}

  void run(Address x, std::int64_t stride, std::int64_t m, Address out, int threads) const {
    multiply_rows({at<const void>(x), stride}, m, at<void>(out), threads);
  }

  void run_after_norm(Address x, std::int64_t stride, Address residual, std::int64_t m,
                      Address norm_weight, float eps, Address total, Address out,
                      int threads) const {
    multiply_rows({at<const void>(x), stride, at<const void>(norm_weight),
                   at<const void>(residual), at<void>(total), eps},
                  m, at<void>(out), threads);
  }

  void run_after_silu(Address gate_up, std::int64_t m, Address out, int threads) const {
    Rows rows{at<const void>(gate_up), 2 * k_};
    rows.silu = true;
    multiply_rows(rows, m, at<void>(out), threads);
  }

  LinearCall call(const void* x, std::int64_t stride, void* out) const {
    return {x, stride, weight_, bias_, out, k_, o_};
  }

 private:
  void multiply_rows(const Rows& rows, std::int64_t m, void* out, int threads) const;
  void prepare(const LinearKernels& table, const Rows& rows, std::int64_t first, std::int64_t last,
               void* to) const;

  Type type_;
  const void* weight_;
  const void* bias_;
  std::int64_t k_, o_;
};

// Rows [first, last) to `to`, rounded to the tensors' type wherever a tensor would hold them.
void Linear::prepare(const LinearKernels& table, const Rows& rows, std::int64_t first,
                     std::int64_t last, void* to) const {
  const int kind = static_cast<int>(type_);
  const std::int64_t width = k_ * element_bytes(type_);
  const std::int64_t count = last - first;
  const void* x = offset(rows.x, first * rows.stride * element_bytes(type_));
  const bool direct = table.prepared_bytes(type_, k_) == 0;
  if (!rows.norm_weight && !rows.silu) return table.prepare[kind](x, rows.stride, count, k_, to);
  void* rounded = direct ? to : room<Use::rounded>(count * width);
  if (rows.silu)
    kernels().rows.silu_mul[kind](x, rounded, 0, count, k_);
  else
    kernels().rows.rms_norm[kind](x, rows.stride, offset(rows.residual, first * width),
                                  offset(rows.total, first * width), rows.norm_weight, rounded, 0,
                                  count, k_, rows.eps);
  if (!direct) table.prepare[kind](rounded, k_, count, k_, to);
}

void Linear::multiply_rows(const Rows& rows, std::int64_t m, void* out, int threads) const {
  const nb::gil_scoped_release release;
  const std::int64_t size = element_bytes(type_);
  const LinearKernels& table = linear_kernels(type_, m);
  const std::int64_t prepared = table.prepared_bytes(type_, k_);
  const std::int64_t row_bytes = prepared ? prepared : k_ * size;
  const bool as_it_lies = !prepared && !rows.norm_weight && !rows.silu;
  const std::int64_t most =
      as_it_lies ? std::max<std::int64_t>(m, 1)
                 : std::max(kTaskRows, kPreparedBytes / row_bytes / kTaskRows * kTaskRows);
  std::vector<Piece> pieces;
  const std::int64_t chunks = parts(m, most);
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    const Range own = part_of(m, chunk, chunks);
    const std::int64_t start = own.first, count = own.size();
    LinearCall product = call(rows.x, rows.stride, offset(out, start * o_ * size));
    if (!as_it_lies) {
      void* to = room<Use::prepared>(whole_blocks(count) * row_bytes);
      over_blocks(count, k_, threads, [&](std::int64_t first, std::int64_t last) {
        prepare(table, rows, start + first, start + last, offset(to, first * row_bytes));
      });
      product.x = to;
      product.x_stride = prepared ? table.prepared_stride(type_, k_) : k_;
    }
    pieces.clear();
    split(table, product, count, threads, pieces);
    multiply(table, type_, pieces, threads);
  }
}

// SwiGLU experts. Rows of x are sorted by expert; each product then runs over all experts at once.
class Experts {
 public:
  Experts(Type type, Address gate_up, Address down, std::int64_t experts, std::int64_t width,
          std::int64_t hidden)
      : type_(type), experts_(experts), width_(width), hidden_(hidden) {
    const std::int64_t bytes = width * hidden * element_bytes(type);
    for (std::int64_t e = 0; e < experts; ++e) {
      gate_up_.emplace_back(type, gate_up + 2 * e * bytes, 0, hidden, 2 * width);
      down_.emplace_back(type, down + e * bytes, 0, width, hidden);
    }
  }

  void run(Address x, std::int64_t stride, std::int64_t n, Address ids, Address weights,
           std::int64_t per_token, Address out, int threads) const {
    const auto* id = at<const std::int64_t>(ids);
    for (std::int64_t i = 0; i < n * per_token; ++i)
      if (id[i] < 0 || id[i] >= experts_)
        throw std::out_of_range("expert " + std::to_string(id[i]) + " of " +
                                std::to_string(experts_));
    const nb::gil_scoped_release release;
    const std::int64_t size = element_bytes(type_);
    const std::int64_t chunk = std::max<std::int64_t>(1, kExpertRows / per_token);
    for (std::int64_t start = 0; start < n; start += chunk)
      run_tokens(at<const char>(x) + start * stride * size, stride, std::min(chunk, n - start),
                 id + start * per_token, at<const float>(weights) + start * per_token, per_token,
                 at<char>(out) + start * hidden_ * size, threads);
  }

 private:
  void run_tokens(const void* x, std::int64_t stride, std::int64_t n, const std::int64_t* ids,
                  const float* weights, std::int64_t per_token, void* out, int threads) const;
  void multiply_sorted(const LinearKernels& table, const std::vector<Linear>& linears,
                       const std::vector<Range>& own, const void* x, std::int64_t stride,
                       std::int64_t row_bytes, void* out, std::int64_t outputs, int threads) const;

  Type type_;
  std::int64_t experts_, width_, hidden_;
  std::vector<Linear> gate_up_, down_;
};

// Each expert's own rows of x through its linear.
void Experts::multiply_sorted(const LinearKernels& table, const std::vector<Linear>& linears,
                              const std::vector<Range>& own, const void* x, std::int64_t stride,
                              std::int64_t row_bytes, void* out, std::int64_t outputs,
                              int threads) const {
  std::vector<LinearCall> calls(experts_);
  std::vector<Piece> pieces;
  for (std::int64_t e = 0; e < experts_; ++e) {
    const std::int64_t first = own[e].first;
    if (own[e].size() == 0) continue;
    calls[e] = linears[e].call(offset(x, first * row_bytes), stride,
                               offset(out, first * outputs * element_bytes(type_)));
    split(table, calls[e], own[e].size(), threads, pieces);
  }
  multiply(table, type_, pieces, threads);
}

void Experts::run_tokens(const void* x, std::int64_t stride, std::int64_t n,
                         const std::int64_t* ids, const float* weights, std::int64_t per_token,
                         void* out, int threads) const {
  const LinearKernels& table = linear_kernels(type_, parts(n * per_token, experts_));
  const int kind = static_cast<int>(type_);
  const std::int64_t size = element_bytes(type_);
  std::vector<std::int64_t> counts(experts_), next(experts_), place(n * per_token);
  for (std::int64_t i = 0; i < n * per_token; ++i) ++counts[ids[i]];
  std::vector<Range> own, blocks;  // rows of each expert, which begin with a block; blocks of all
  std::int64_t rows = 0;
  for (std::int64_t e = 0; e < experts_; ++e) {
    own.push_back({rows, rows + counts[e]});
    next[e] = rows;
    for (std::int64_t row = rows; row < own[e].last; row += kRowBlock)
      blocks.push_back({row, std::min(row + kRowBlock, own[e].last)});
    rows += whole_blocks(counts[e]);
  }
  std::vector<std::int64_t> token(rows);
  for (std::int64_t i = 0; i < n * per_token; ++i) {
    place[i] = next[ids[i]]++;
    token[place[i]] = i / per_token;
  }

  const auto stride_of = [&](std::int64_t k) {
    return table.prepared_bytes(type_, k) ? table.prepared_stride(type_, k) : k;
  };
  const auto bytes_of = [&](std::int64_t k) {
    const std::int64_t prepared = table.prepared_bytes(type_, k);
    return prepared ? prepared : k * size;
  };
  const std::int64_t x_bytes = bytes_of(hidden_), inner_bytes = bytes_of(width_);
  void* prepared = room<Use::prepared>(rows * std::max(x_bytes, inner_bytes));
  void* inner = room<Use::inner>(rows * 2 * width_ * size);
  void* outer = room<Use::outer>(rows * hidden_ * size);

  const auto over_all = [&](std::int64_t width, std::int64_t row_bytes, const auto& fill) {
    const bool direct = table.prepared_bytes(type_, width) == 0;
    const auto body = [&](std::int64_t from, std::int64_t to) {
      for (std::int64_t i = from; i < to; ++i) {
        const Range block = blocks[i];
        void* target = offset(prepared, block.first * row_bytes);
        void* rounded = direct ? target : room<Use::rounded>(kRowBlock * width * size);
        fill(block, rounded);
        if (!direct) table.prepare[kind](rounded, width, block.size(), width, target);
      }
    };
    over_rows(static_cast<std::int64_t>(blocks.size()), width * kRowBlock, threads, body);
  };
  over_all(hidden_, x_bytes, [&](Range block, void* to) {
    for (std::int64_t row = block.first; row < block.last; ++row)
      std::memcpy(offset(to, (row - block.first) * hidden_ * size),
                  offset(x, token[row] * stride * size), hidden_ * size);
  });
  multiply_sorted(table, gate_up_, own, prepared, stride_of(hidden_), x_bytes, inner, 2 * width_,
                  threads);
  over_all(width_, inner_bytes, [&](Range block, void* to) {
    kernels().rows.silu_mul[kind](offset(inner, block.first * 2 * width_ * size), to, 0, block.size(),
                              width_);
  });
  multiply_sorted(table, down_, own, prepared, stride_of(width_), inner_bytes, outer, hidden_, threads);
  over_rows(n, hidden_ * per_token, threads, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last; ++row)
      table.weighted_sum[kind](outer, place.data() + row * per_token, weights + row * per_token,
                               static_cast<int>(per_token), hidden_,
                               offset(out, row * hidden_ * size));
  });
}

}  // namespace

void bind_linear(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Linear>(m, "Linear")
      .def(nb::init<Type, Address, Address, std::int64_t, std::int64_t>(), "type"_a, "weight"_a,
           "bias"_a, "inputs"_a, "outputs"_a)
      .def("run", &Linear::run, "x"_a, "x_stride"_a, "rows"_a, "out"_a, "threads"_a)
      .def("run_after_norm", &Linear::run_after_norm, "x"_a, "x_stride"_a, "residual"_a, "rows"_a,
           "norm_weight"_a, "eps"_a, "total"_a, "out"_a, "threads"_a)
      .def("run_after_silu", &Linear::run_after_silu, "gate_up"_a, "rows"_a, "out"_a, "threads"_a);
  nb::class_<Experts>(m, "Experts")
      .def(nb::init<Type, Address, Address, std::int64_t, std::int64_t, std::int64_t>(), "type"_a,
           "gate_up"_a, "down"_a, "experts"_a, "width"_a, "hidden"_a)
      .def("run", &Experts::run, "x"_a, "x_stride"_a, "rows"_a, "expert_ids"_a, "weights"_a,
           "per_token"_a, "out"_a, "threads"_a);
}

}  // namespace millrace
