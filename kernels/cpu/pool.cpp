#include "pool.hpp"

#include <pthread.h>

#include <chrono>
#include <new>
#include <system_error>
#include <thread>

namespace millrace {
namespace {

constexpr std::uint32_t kClosed = 0xffffffffu;  // an index past every count
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kSpinsPerLook = 32;
constexpr int kCaller = -1;

Pool* g_pool = nullptr;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Never freed: workers may still sleep in it when the process exits.
void renew_pool() { g_pool = new Pool; }

}  // namespace

Pool& Pool::instance() {
  static const int registered = [] {
    renew_pool();
    return pthread_atfork(nullptr, nullptr, renew_pool);
  }();
  (void)registered;
  return *g_pool;
}

void Pool::run(int count, int threads, Task task, const void* context) {
  if (count <= 0) return;
  const bool alone = threads <= 1 || count == 1;
  std::unique_lock<std::mutex> lock(busy_, std::defer_lock);
  if (alone || !lock.try_lock()) {
    for (int i = 0; i < count; ++i) task(context, i);
    return;
  }
  start_workers(threads - 1);
  // A worker claims an index only if the word it read is still there. Closing the word first
  // makes sure that what it read beside the word belongs to the same loop.
  const std::uint64_t generation = static_cast<std::uint64_t>(++generation_) << 32;
  claim_.store(generation | kClosed);
  task_.store(task);
  context_.store(context);
  count_.store(static_cast<std::uint32_t>(count));
  helpers_.store(threads - 1);
  done_.store(0);
  claim_.store(generation);
  if (sleepers_.load() > 0) {
    wakes_.fetch_add(1);
    wakes_.notify_all();
  }
  drain(kCaller);
  for (int spins = 0; done_.load(std::memory_order_acquire) != static_cast<std::uint32_t>(count);) {
    if (++spins < 1000)
      pause();
    else
      std::this_thread::yield();
  }
}

void Pool::start_workers(int wanted) {
  for (; workers_ < wanted; ++workers_) {
    try {
      std::thread(&Pool::work, this, workers_).detach();
    } catch (const std::system_error&) {
      return;  // no more threads to be had: the caller and the workers there are do it
    }
  }
}

// Take indices until none is left; true when there was one.
bool Pool::drain(int worker) {
  bool worked = false;
  for (;;) {
    std::uint64_t word = claim_.load();
    const std::uint32_t index = static_cast<std::uint32_t>(word);
    const Task task = task_.load();
    const void* context = context_.load();
    if (index >= count_.load() || worker >= helpers_.load()) return worked;
    if (!claim_.compare_exchange_weak(word, word + 1)) continue;
    task(context, static_cast<int>(index));
    done_.fetch_add(1, std::memory_order_release);
    worked = true;
  }
}

void Pool::work(int worker) {
  auto idle_since = std::chrono::steady_clock::now();
  for (;;) {
    if (drain(worker)) {
      idle_since = std::chrono::steady_clock::now();
      continue;
    }
    for (int i = 0; i < kSpinsPerLook; ++i) pause();
    if (std::chrono::steady_clock::now() - idle_since < kSpin) continue;
    const std::uint32_t wakes = wakes_.load();
    sleepers_.fetch_add(1);
    if (!drain(worker)) wakes_.wait(wakes);
    sleepers_.fetch_sub(1);
    idle_since = std::chrono::steady_clock::now();
  }
}

}  // namespace millrace
