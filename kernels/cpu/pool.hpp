// A small thread pool for loops of a few microseconds.
//
// The caller works too, and waits only for tasks that a worker has begun: a worker that the system
// doesn't schedule in time costs nothing. Workers spin briefly for the next loop, then sleep.

#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace millrace {

class Pool {
 public:
  using Task = void (*)(const void* context, int index);

  // The process's pool. A forked child gets a new one, for threads don't survive a fork.
  static Pool& instance();

  // Calls task(context, i) for every i in [0, count), on at most `threads` threads, and returns
  // when all are done. While another thread is in here, the caller works alone.
  void run(int count, int threads, Task task, const void* context);

 private:
  void start_workers(int wanted);
  void work(int worker);
  bool drain(int worker);

  std::mutex busy_;
  std::atomic<std::uint64_t> claim_{0};  // generation << 32 | next index
  std::uint32_t generation_ = 0;
  std::atomic<Task> task_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<std::uint32_t> count_{0};
  std::atomic<int> helpers_{0};
  std::atomic<std::uint32_t> done_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<std::uint32_t> wakes_{0};
  int workers_ = 0;
};

// Calls body(i) for every i in [0, count).
template <class Body>
void parallel_for(int count, int threads, const Body& body) {
  Pool::instance().run(
      count, threads, [](const void* context, int index) { (*static_cast<const Body*>(context))(index); },
      &body);
}

}  // namespace millrace
