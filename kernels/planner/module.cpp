// The Python module `millrace.core.scheduler.planning._cdsp`. A plan costs one call: the queue times are read
// where they lie, and the plan's tuples are made here.

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <span>
#include <stdexcept>
#include <string_view>
#include <tuple>
#include <vector>

#include "planner.hpp"

namespace nb = nanobind;

namespace millrace {
namespace {

using Segments = std::vector<std::tuple<std::int64_t, double, double, double>>;
using Degrees = std::vector<std::tuple<int, double, Segments>>;

std::vector<Planner::Degree> to_degrees(const Degrees& given, std::size_t instances) {
  std::vector<Planner::Degree> degrees;
  for (const auto& [sp, c, rows] : given) {
    if (sp < 1 || sp > static_cast<int>(instances) || (!degrees.empty() && sp <= degrees.back().sp))
      throw std::invalid_argument("degrees must ascend from 1, none larger than the pool");
    std::vector<Segment> segments;
    for (const auto& [start, a, b, d] : rows) segments.push_back({start, a, b, d});
    if (segments.empty()) throw std::invalid_argument("every degree needs a segment");
    degrees.push_back({sp, Latency(c, std::move(segments))});
  }
  if (degrees.empty()) throw std::invalid_argument("at least one degree must fit the pool");
  return degrees;
}

const std::vector<int>& checked(const std::vector<int>& nodes) {
  if (nodes.empty()) throw std::invalid_argument("a pool has at least one instance");
  const std::set<int> numbers(nodes.begin(), nodes.end());
  if (*numbers.begin() != 0 || *numbers.rbegin() + 1 != static_cast<int>(numbers.size()))
    throw std::invalid_argument("nodes must be numbered from 0 without gaps");
  return nodes;
}

// A buffer of doubles that gives itself back.
class Doubles {
 public:
  explicit Doubles(nb::handle from) {
    if (PyObject_GetBuffer(from.ptr(), &view_, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0)
      throw nb::python_error();
    if (view_.itemsize != sizeof(double) || view_.format == nullptr ||
        std::string_view(view_.format) != "d") {
      PyBuffer_Release(&view_);
      throw nb::type_error("queue_s must be an array of doubles");
    }
  }
  Doubles(const Doubles&) = delete;
  Doubles& operator=(const Doubles&) = delete;
  ~Doubles() { PyBuffer_Release(&view_); }
  const double* data() const { return static_cast<const double*>(view_.buf); }
  std::size_t size() const { return static_cast<std::size_t>(view_.len) / sizeof(double); }

 private:
  Py_buffer view_;
};

// tuple.__new__ of a named tuple's class: its own constructor is a Python function, and slow.
nb::object make_named(nb::handle type, const nb::object& first, const nb::object& second) {
  const nb::object fields = nb::steal(PyTuple_Pack(2, first.ptr(), second.ptr()));
  const nb::object arguments = nb::steal(PyTuple_Pack(1, fields.ptr()));
  PyObject* made =
      PyTuple_Type.tp_new(reinterpret_cast<PyTypeObject*>(type.ptr()), arguments.ptr(), nullptr);
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

class PyPlanner {
 public:
  PyPlanner(const std::vector<int>& nodes, const Degrees& degrees, std::int64_t min_chunk_tokens,
            nb::object plan_type, nb::object chunk_type)
      : planner_(checked(nodes), to_degrees(degrees, nodes.size()), min_chunk_tokens),
        members_(nodes.size()),
        plan_type_(std::move(plan_type)),
        chunk_type_(std::move(chunk_type)) {}

  nb::object plan(std::int64_t tokens, nb::handle queue_s, int least_sp, double improvement_rate) {
    const Doubles queue(queue_s);
    check(tokens, queue);
    return made(planner_.plan(tokens, queue.data(), least_sp, improvement_rate));
  }

  nb::object plan_single_chunk(std::int64_t tokens, nb::handle queue_s, int least_sp,
                               double improvement_rate) {
    const Doubles queue(queue_s);
    check(tokens, queue);
    return made(planner_.plan_single_chunk(tokens, queue.data(), least_sp, improvement_rate));
  }

 private:
  void check(std::int64_t tokens, const Doubles& queue_s) const {
    if (tokens < 1) throw std::invalid_argument("tokens must be 1 or more");
    if (queue_s.size() != members_.size())
      throw std::invalid_argument("queue_s must have one double an instance");
    const double* end = queue_s.data() + queue_s.size();
    if (std::any_of(queue_s.data(), end, [](double s) { return std::isnan(s); }))
      throw std::invalid_argument("queue_s must not hold NaN");  // it has no place in an order
  }

  nb::object made(double ttft_s) {
    const std::span<const Chunk> chunks = planner_.chunks();
    const nb::object all = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(chunks.size())));
    if (!all.is_valid()) throw nb::python_error();
    for (std::size_t i = 0; i < chunks.size(); ++i)
      PyTuple_SET_ITEM(all.ptr(), static_cast<Py_ssize_t>(i), made(chunks[i]).release().ptr());
    return make_named(plan_type_, all, nb::float_(ttft_s));
  }

  nb::object made(const Chunk& chunk) {
    planner_.members(chunk.group, members_.data());
    const nb::object members = nb::steal(PyTuple_New(chunk.group.size));
    if (!members.is_valid()) throw nb::python_error();
    for (int i = 0; i < chunk.group.size; ++i)
      PyTuple_SET_ITEM(members.ptr(), i, PyLong_FromLong(members_[i]));
    return make_named(chunk_type_, nb::int_(chunk.num_tokens), members);
  }

  Planner planner_;
  std::vector<int> members_;
  nb::object plan_type_;
  nb::object chunk_type_;
};

}  // namespace
}  // namespace millrace

NB_MODULE(_cdsp, m) {
  using millrace::PyPlanner;
  nb::set_leak_warnings(false);  // a planner that lives as long as its process is no leak
  nb::class_<PyPlanner>(m, "CdspPlanner")
      .def(nb::init<const std::vector<int>&, const millrace::Degrees&, std::int64_t, nb::object,
                    nb::object>(),
           nb::arg("nodes"), nb::arg("degrees"), nb::arg("min_chunk_tokens"), nb::arg("plan_type"),
           nb::arg("chunk_type"))
      .def("plan", &PyPlanner::plan, nb::arg("tokens"), nb::arg("queue_s"), nb::arg("least_sp"),
           nb::arg("improvement_rate"))
      .def("plan_single_chunk", &PyPlanner::plan_single_chunk, nb::arg("tokens"),
           nb::arg("queue_s"), nb::arg("least_sp"), nb::arg("improvement_rate"));
}
