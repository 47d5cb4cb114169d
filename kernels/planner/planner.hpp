// CDSP planning: Tetris section 5.1, Algorithms 1 to 3. core/scheduler/planning/cdsp_reference.py says what
// is decided and why; this is the same search, made quick:
//
// - In a node, groups always take the shortest queues first, so a group is a count a node.
// - Queue times stay on the clock of the plan's start (Eq. (2) moves that clock), so each node is
//   sorted once.
// - A branch whose chunks so far end no earlier than the best plan is left out: latencies are never
//   negative, and only a strictly earlier end replaces a plan, so no decision changes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "latency.hpp"

namespace millrace {

// The first `count` instances of a node, shortest queue first.
struct Part {
  int node;
  int count;
};

struct Group {
  std::vector<Part> parts;  // in the order they were taken; only the last may be extended
  int size = 0;
  double queue_s = 0.0;  // until its last member is free
};

// What groups may be made of.
struct Pool {
  std::vector<Part> parts;  // the node that is free as a whole the earliest first
  std::vector<int> counts;  // by node
  int size = 0;
  int largest = 0;  // of the counts
  double queue_s = 0.0;
};

struct Chunk {
  std::int64_t num_tokens = 0;
  Group group;
};

class Planner {
 public:
  struct Degree {
    int sp;
    Latency latency;
  };

  // `nodes[i]` is the node of instance i, from 0 without gaps. `degrees` ascend, and none is larger
  // than the pool.
  Planner(std::span<const int> nodes, std::vector<Degree> degrees, std::int64_t min_chunk_tokens);

  int size() const { return static_cast<int>(by_node_.size()); }

  // Both leave the plan in `chunks()` and return its TTFT in seconds. `queue_s` has one double an
  // instance. `plan` is Algorithm 1, `plan_single_chunk` Algorithm 2 on the whole prompt.
  double plan(std::int64_t tokens, const double* queue_s, int least_sp, double improvement_rate);
  double plan_single_chunk(std::int64_t tokens, const double* queue_s, int least_sp,
                           double improvement_rate);

  std::span<const Chunk> chunks() const { return {best_.data(), best_count_}; }

  // Writes the members of a group of the last plan, those of earlier chunks first.
  void members(const Group& group, int* out) const;

 private:
  // What one call of Algorithm 1 works with; calls nest as deep as there are degrees.
  struct Level {
    std::vector<double> whole_s;  // of all that is left as one chunk, a degree each
    Group single;                 // of Algorithm 2
    Group current;                // of Algorithm 3
    Pool pool;                    // the first of them, for the second
  };
  struct Step {
    std::int64_t num_tokens;
    const Group* group;
  };
  struct Choice {
    int degree;
    double queue_s;
    double end_s;
  };

  void start(std::int64_t tokens, const double* queue_s, int least_sp, double improvement_rate);
  void sort_nodes(const double* queue_s);
  double queue_at(int node, int count) const { return sorted_s_[first_[node] + count - 1]; }
  void mark(const Group& group, std::size_t from, char value);
  template <typename Take>
  void walk(const Pool& pool, const Group& initial, int size, Take&& take) const;
  double queue_of(const Pool& pool, const Group& initial, int size) const;
  void extend(const Pool& pool, const Group& initial, int size, Group* group) const;
  void to_pool(const Group& group, Pool* pool) const;
  Choice single_chunk(const Pool& pool, const Group& initial, int first_degree, int last_degree,
                      double elapsed_s, Level* level);
  void explore(const Pool& pool, const Group& initial, int first_degree, int last_degree,
               int depth, double elapsed_s);
  void try_pair(const Pool& pool, int current, int next, int last_degree, int depth,
                double elapsed_s);
  void keep(int depth, double end_s);

  std::vector<int> first_;    // of a node: its first place in the arrays by node; and their end
  std::vector<int> by_node_;  // instances, a node after the other, ascending
  std::vector<Degree> degrees_;
  std::int64_t min_chunk_tokens_;

  const Group nobody_;
  Group whole_;  // all instances
  Pool everyone_;
  std::vector<Level> levels_;
  std::vector<char> marked_;  // by node: in the group that is being extended

  // Of the plan being made.
  std::vector<double> sorted_s_;  // queue times, a node after the other, shortest first
  std::vector<int> sorted_;       // whose they are
  std::int64_t left_ = 0;  // tokens of the prompt without a chunk
  std::int64_t done_ = 0;  // and with one
  int least_degree_ = 0;     // the last chunk's degree is this one or a larger one
  double keep_share_ = 1.0;  // 1 - improvement rate
  double best_end_s_ = 0.0;
  std::vector<Step> path_;
  std::vector<Chunk> best_;
  std::size_t best_count_ = 0;
};

}  // namespace millrace
