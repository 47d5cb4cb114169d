#include "planner.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

namespace millrace {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

}  // namespace

Planner::Planner(std::span<const int> nodes, std::vector<Degree> degrees,
                 std::int64_t min_chunk_tokens)
    : degrees_(std::move(degrees)), min_chunk_tokens_(min_chunk_tokens) {
  const int count = 1 + *std::max_element(nodes.begin(), nodes.end());
  first_.push_back(0);
  for (int node = 0; node < count; ++node) {
    for (std::size_t i = 0; i < nodes.size(); ++i)
      if (nodes[i] == node) by_node_.push_back(static_cast<int>(i));
    first_.push_back(static_cast<int>(by_node_.size()));
    everyone_.parts.push_back({node, first_[node + 1] - first_[node]});
  }
  everyone_.size = size();
  sorted_ = by_node_;
  sorted_s_.resize(by_node_.size());
  has_node_.resize(static_cast<std::size_t>(count));
  path_.resize(degrees_.size());
  best_.resize(degrees_.size());
  levels_.resize(degrees_.size());
  for (Level& level : levels_) {
    level.single.resize(degrees_.size());
    level.current.resize(degrees_.size());
  }
}

double Planner::plan(std::int64_t tokens, const double* queue_s, int least_sp,
                     double improvement_rate) {
  start(tokens, queue_s, least_sp, improvement_rate);
  explore(everyone_, nobody_, 0, static_cast<int>(degrees_.size()) - 1, 0, 0.0);
  return best_end_s_;
}

double Planner::plan_single_chunk(std::int64_t tokens, const double* queue_s, int least_sp,
                                  double improvement_rate) {
  start(tokens, queue_s, least_sp, improvement_rate);
  double end_s = 0.0;
  const int last = static_cast<int>(degrees_.size()) - 1;
  const int chosen = single_chunk(everyone_, nobody_, least_degree_, last, 0, 0.0, &end_s);
  path_[0] = {left_, &levels_[0].single[chosen]};
  keep(0, end_s);
  return best_end_s_;
}

void Planner::members(const Group& group, int* out) const {
  for (const Part& part : group.parts) {
    const int* from = sorted_.data() + first_[part.node];
    out = std::copy(from, from + part.count, out);
  }
}

void Planner::start(std::int64_t tokens, const double* queue_s, int least_sp,
                    double improvement_rate) {
  left_ = tokens;
  done_ = 0;
  keep_share_ = 1.0 - improvement_rate;
  best_end_s_ = kNever;
  best_count_ = 0;
  least_degree_ = 0;
  const int last = static_cast<int>(degrees_.size()) - 1;
  while (least_degree_ < last && degrees_[least_degree_].sp < least_sp) ++least_degree_;
  sort_nodes(queue_s);
}

void Planner::sort_nodes(const double* queue_s) {
  for (std::size_t node = 0; node + 1 < first_.size(); ++node) {
    for (int at = first_[node]; at < first_[node + 1]; ++at) {
      const int instance = by_node_[at];
      const double value = queue_s[instance];
      int to = at;
      for (; to > first_[node] && sorted_s_[to - 1] > value; --to) {
        sorted_s_[to] = sorted_s_[to - 1];
        sorted_[to] = sorted_[to - 1];
      }
      sorted_s_[to] = value;
      sorted_[to] = instance;
    }
  }
}

// GetGroup: `initial` with members of `pool` added up to `size`.
void Planner::extend(const Group& pool, const Group& initial, int size, Group* group) {
  group->parts.assign(initial.parts.begin(), initial.parts.end());
  group->size = initial.size;
  group->queue_s = initial.queue_s;
  if (!group->parts.empty()) {
    Part& last = group->parts.back();
    const auto same = [&](const Part& part) { return part.node == last.node; };
    const Part& room = *std::find_if(pool.parts.begin(), pool.parts.end(), same);
    const int more = std::min(size - group->size, room.count - last.count);
    if (more > 0) {
      last.count += more;
      group->size += more;
      group->queue_s = std::max(group->queue_s, queue_at(last.node, last.count));
    }
  }
  if (group->size < size) extend_to_new_nodes(pool, size, group);
}

void Planner::extend_to_new_nodes(const Group& pool, int size, Group* group) {
  for (const Part& part : group->parts) has_node_[part.node] = 1;
  while (group->size < size) {
    const Part& from = next_node(pool, size - group->size);
    const int count = std::min(from.count, size - group->size);
    group->parts.push_back({from.node, count});
    group->size += count;
    group->queue_s = std::max(group->queue_s, queue_at(from.node, count));
    has_node_[from.node] = 1;
  }
  for (const Part& part : group->parts) has_node_[part.node] = 0;
}

// The node to take `wanted` instances from: that with the earliest of those that have so many; if
// none has, the one that is free as a whole the earliest. The lowest node wins among equals.
const Part& Planner::next_node(const Group& pool, int wanted) const {
  const Part* fits = nullptr;
  const Part* whole = nullptr;
  double fits_s = kNever;
  double whole_s = kNever;
  const auto earlier = [](double s, const Part& part, double best_s, const Part* best) {
    return best == nullptr || s < best_s || (s == best_s && part.node < best->node);
  };
  for (const Part& part : pool.parts) {
    if (has_node_[part.node]) continue;
    if (part.count >= wanted) {
      const double s = queue_at(part.node, wanted);
      if (earlier(s, part, fits_s, fits)) fits = &part, fits_s = s;
    } else if (fits == nullptr) {
      const double s = queue_at(part.node, part.count);
      if (earlier(s, part, whole_s, whole)) whole = &part, whole_s = s;
    }
  }
  return fits != nullptr ? *fits : *whole;
}

// Algorithm 2 on what is left. Returns the degree's place; its group is in the level.
int Planner::single_chunk(const Group& pool, const Group& initial, int first_degree,
                          int last_degree, int depth, double elapsed_s, double* end_s) {
  int chosen = -1;
  double best_s = kNever;
  for (int at = first_degree; at <= last_degree; ++at) {
    Group& group = levels_[depth].single[at];
    extend(pool, initial, degrees_[at].sp, &group);
    const double start_s = std::max(elapsed_s, group.queue_s);
    const double end = start_s + degrees_[at].latency.chunk_s(left_, done_);
    const double ttft_s = end - elapsed_s;
    if (chosen < 0 || ttft_s < best_s * keep_share_) {
      chosen = at;
      best_s = ttft_s;
      *end_s = end;
    }
  }
  return chosen;
}

// Algorithm 1.
void Planner::explore(const Group& pool, const Group& initial, int first_degree, int last_degree,
                      int depth, double elapsed_s) {
  double end_s = 0.0;
  const int chosen = single_chunk(pool, initial, std::max(first_degree, least_degree_),
                                  last_degree, depth, elapsed_s, &end_s);
  const Group& group = levels_[depth].single[chosen];
  if (best_count_ == 0 || end_s < best_end_s_) {
    path_[depth] = {left_, &group};
    keep(depth, end_s);
  }
  if (group.queue_s <= elapsed_s) return;  // all of it is free: no time to fill
  for (int current = first_degree; current < chosen; ++current) {
    extend(group, initial, degrees_[current].sp, &levels_[depth].current[current]);
    for (int next = current + 1; next <= chosen; ++next)
      try_pair(group, current, next, chosen, depth, elapsed_s);
  }
}

// Algorithm 3 and the rest of the loop of Algorithm 1 for one pair.
void Planner::try_pair(const Group& pool, int current, int next, int last_degree, int depth,
                       double elapsed_s) {
  const Group& group = levels_[depth].current[current];
  const double start_s = std::max(elapsed_s, group.queue_s);
  extend(pool, group, degrees_[next].sp, &next_);
  const double budget_s = std::max(elapsed_s, next_.queue_s) - start_s;
  if (!(budget_s > 0.0)) return;
  const std::int64_t left = left_;
  const std::int64_t done = done_;
  const Latency& latency = degrees_[current].latency;
  const std::int64_t tokens = std::min(left, latency.tokens_within(budget_s, done));
  if (tokens < min_chunk_tokens_) return;
  const double end_s = start_s + latency.chunk_s(tokens, done);
  if (end_s >= best_end_s_) return;  // later chunks only add to it
  path_[depth] = {tokens, &group};
  if (tokens == left) {
    if (current >= least_degree_) keep(depth, end_s);
    return;
  }
  const Latency& after = degrees_[next].latency;
  if (!(after.chunk_s(left - tokens, done + tokens) < after.chunk_s(left, done))) return;
  left_ = left - tokens;
  done_ = done + tokens;
  explore(pool, group, next, last_degree, depth + 1, end_s);
  left_ = left;
  done_ = done;
}

void Planner::keep(int depth, double end_s) {
  best_end_s_ = end_s;
  best_count_ = static_cast<std::size_t>(depth) + 1;
  for (std::size_t i = 0; i < best_count_; ++i) {
    best_[i].num_tokens = path_[i].num_tokens;
    best_[i].group = *path_[i].group;
  }
}

}  // namespace millrace
