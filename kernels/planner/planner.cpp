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
    whole_.parts.push_back({node, first_[node + 1] - first_[node]});
  }
  whole_.size = size();
  sorted_ = by_node_;
  sorted_s_.resize(by_node_.size());
  marked_.resize(static_cast<std::size_t>(count));
  everyone_.counts.resize(marked_.size());
  path_.resize(degrees_.size());
  best_.resize(degrees_.size());
  levels_.resize(degrees_.size());
  for (Level& level : levels_) {
    level.whole_s.resize(degrees_.size());
    level.pool.counts.resize(marked_.size());
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
  Level& level = levels_[0];
  const int last = static_cast<int>(degrees_.size()) - 1;
  const Choice chosen = single_chunk(everyone_, nobody_, 0, last, 0.0, &level);
  extend(everyone_, nobody_, degrees_[chosen.degree].sp, &level.single);
  path_[0] = {left_, &level.single};
  keep(0, chosen.end_s);
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
  to_pool(whole_, &everyone_);
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

// Notes which nodes a group has, from its part `from` on.
void Planner::mark(const Group& group, std::size_t from, char value) {
  for (std::size_t i = from; i < group.parts.size(); ++i) marked_[group.parts[i].node] = value;
}

// GetGroup: calls take(node, count) for each node of which `initial`, which is marked, needs the
// first `count` members to have `size` of them.
//
// Its last node first. Then, while no node has as many as are wanted, the node that is free as a
// whole the earliest; at last, of those that have, that with the earliest. The lowest node wins
// among equals.
template <typename Take>
void Planner::walk(const Pool& pool, const Group& initial, int size, Take&& take) const {
  int wanted = size - initial.size;
  if (!initial.parts.empty()) {
    const Part& last = initial.parts.back();
    const int more = std::min(wanted, pool.counts[last.node] - last.count);
    if (more > 0) take(last.node, last.count + more);
    wanted -= more;
  }
  for (auto part = pool.parts.begin(); wanted > 0; ++part) {
    if (marked_[part->node]) continue;
    auto best = part;
    if (wanted <= pool.largest) {
      double best_s = kNever;
      for (auto other = part; other != pool.parts.end(); ++other) {
        if (other->count < wanted || marked_[other->node]) continue;
        const double s = queue_at(other->node, wanted);
        if (best->count < wanted || s < best_s || (s == best_s && other->node < best->node)) {
          best = other;
          best_s = s;
        }
      }
    }
    const int count = std::min(wanted, best->count);
    take(best->node, count);
    wanted -= count;
  }
}

// The queue of the group that `extend` would make.
double Planner::queue_of(const Pool& pool, const Group& initial, int size) const {
  if (size == pool.size) return pool.queue_s;
  double queue_s = initial.queue_s;
  walk(pool, initial, size,
       [&](int node, int count) { queue_s = std::max(queue_s, queue_at(node, count)); });
  return queue_s;
}

// `initial`, which is marked, with members of `pool` added up to `size`.
void Planner::extend(const Pool& pool, const Group& initial, int size, Group* group) const {
  group->parts.assign(initial.parts.begin(), initial.parts.end());
  group->size = size;
  group->queue_s = initial.queue_s;
  walk(pool, initial, size, [&](int node, int count) {
    if (!group->parts.empty() && group->parts.back().node == node)
      group->parts.back().count = count;
    else
      group->parts.push_back({node, count});
    group->queue_s = std::max(group->queue_s, queue_at(node, count));
  });
}

void Planner::to_pool(const Group& group, Pool* pool) const {
  for (const Part& part : pool->parts) pool->counts[part.node] = 0;
  pool->parts.assign(group.parts.begin(), group.parts.end());
  pool->size = group.size;
  pool->largest = 0;
  for (const Part& part : pool->parts) {
    pool->counts[part.node] = part.count;
    pool->largest = std::max(pool->largest, part.count);
  }
  const auto earlier = [this](const Part& a, const Part& b) {
    const double a_s = queue_at(a.node, a.count);
    const double b_s = queue_at(b.node, b.count);
    return a_s < b_s || (a_s == b_s && a.node < b.node);
  };
  std::sort(pool->parts.begin(), pool->parts.end(), earlier);
  pool->queue_s = queue_at(pool->parts.back().node, pool->parts.back().count);
}

// Algorithm 2 on what is left.
Planner::Choice Planner::single_chunk(const Pool& pool, const Group& initial, int first_degree,
                                      int last_degree, double elapsed_s, Level* level) {
  Choice chosen{-1, 0.0, 0.0};
  double best_s = kNever;
  for (int at = first_degree; at <= last_degree; ++at) {
    level->whole_s[at] = degrees_[at].latency.chunk_s(left_, done_);
    if (at < least_degree_) continue;
    const double queue_s = queue_of(pool, initial, degrees_[at].sp);
    const double end_s = std::max(elapsed_s, queue_s) + level->whole_s[at];
    const double ttft_s = end_s - elapsed_s;
    if (chosen.degree < 0 || ttft_s < best_s * keep_share_) {
      chosen = {at, queue_s, end_s};
      best_s = ttft_s;
    }
  }
  return chosen;
}

// Algorithm 1. `initial` is marked.
void Planner::explore(const Pool& pool, const Group& initial, int first_degree, int last_degree,
                      int depth, double elapsed_s) {
  Level& level = levels_[depth];
  const Choice chosen =
      single_chunk(pool, initial, first_degree, last_degree, elapsed_s, &level);
  const bool better = best_count_ == 0 || chosen.end_s < best_end_s_;
  // No smaller group, or one that would not be free any sooner: nothing to fill.
  const bool over = chosen.degree == first_degree || chosen.queue_s <= elapsed_s;
  if (over && !better) return;
  const int size = degrees_[chosen.degree].sp;
  extend(pool, initial, size, &level.single);
  if (better) {
    path_[depth] = {left_, &level.single};
    keep(depth, chosen.end_s);
  }
  if (over) return;
  if (size < pool.size) to_pool(level.single, &level.pool);
  const Pool& inner = size < pool.size ? level.pool : pool;
  for (int current = first_degree; current < chosen.degree; ++current) {
    extend(inner, initial, degrees_[current].sp, &level.current);
    mark(level.current, initial.parts.size(), 1);
    for (int next = current + 1; next <= chosen.degree; ++next)
      try_pair(inner, current, next, chosen.degree, depth, elapsed_s);
    mark(level.current, initial.parts.size(), 0);
  }
}

// Algorithm 3 and the rest of the loop of Algorithm 1 for one pair. The level's current group is
// marked.
void Planner::try_pair(const Pool& pool, int current, int next, int last_degree, int depth,
                       double elapsed_s) {
  const Level& level = levels_[depth];
  const double start_s = std::max(elapsed_s, level.current.queue_s);
  const double next_s = queue_of(pool, level.current, degrees_[next].sp);
  const double budget_s = std::max(elapsed_s, next_s) - start_s;
  if (!(budget_s > 0.0)) return;
  const std::int64_t left = left_;
  const std::int64_t done = done_;
  const Latency& latency = degrees_[current].latency;
  const std::int64_t tokens = std::min(left, latency.tokens_within(budget_s, done));
  if (tokens < min_chunk_tokens_) return;
  const double end_s = start_s + latency.chunk_s(tokens, done);
  if (end_s >= best_end_s_) return;  // later chunks only add to it
  path_[depth] = {tokens, &level.current};
  if (tokens == left) {
    if (current >= least_degree_) keep(depth, end_s);
    return;
  }
  const double rest_s = degrees_[next].latency.chunk_s(left - tokens, done + tokens);
  if (!(rest_s < level.whole_s[next])) return;
  left_ = left - tokens;
  done_ = done + tokens;
  explore(pool, level.current, next, last_degree, depth + 1, end_s);
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
