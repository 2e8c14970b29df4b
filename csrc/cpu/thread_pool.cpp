// Why not an OpenMP region: its end is a barrier that every thread must reach, so on a machine that runs
// anything else each region waits until the system schedules the last worker, which is milliseconds; a
// decoded token has some eighty regions. Here work is claimed: a worker that is late finds nothing left, and
// the caller goes on.
#include "thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace specdec::cpu {

namespace {

constexpr int kMaxThreads = 64;
// Long enough to meet the next op of a decoding layer, which comes within 10 us, and short enough to sleep
// when other libraries' threads want the core: a thread that slept is scheduled at once when it is woken.
constexpr std::chrono::microseconds kSpin{50};
constexpr int kSpinsBetweenClocks = 16;

thread_local bool inside = false;  // this thread runs a body now

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Waits for `done` without giving up the core, for kSpin at most; returns whether it came.
template <typename Done>
bool spin_until(Done done) {
  const auto stop = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kSpinsBetweenClocks; ++i) {
      if (done()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < stop);
  return false;
}

class Pool {
 public:
  void run(int64_t n, int64_t step, int threads, void* context, void (*body)(void*, int64_t, int64_t)) {
    std::unique_lock<std::mutex> only(one_caller_, std::try_to_lock);
    if (!only.owns_lock()) {  // another thread decodes at the same time: the cores are taken
      body(context, 0, n);
      return;
    }
    start_workers(threads - 1);
    body_ = body, context_ = context, step_ = step, threads_ = threads;
    failed_ = nullptr;
    for (int t = 0; t < threads; ++t) {
      shares_[t].end = n * (t + 1) / threads;
      shares_[t].next.store(n * t / threads, std::memory_order_relaxed);
    }
    open_.store(true);
    epoch_.fetch_add(1);
    if (sleeping_.load() > 0) {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    inside = true;
    work(0);
    inside = false;
    // Nobody may read the body's context after this call, which may end in an exception.
    // Sequentially consistent on both sides: a worker that misses this store is seen in `busy_`.
    open_.store(false);
    if (!spin_until([this] { return busy_.load() == 0; })) {
      while (busy_.load() > 0) std::this_thread::yield();
    }
    if (failed_ != nullptr) std::rethrow_exception(std::exchange(failed_, nullptr));
  }

 private:
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  // The first exception of a body (scratch that cannot be had) is kept for the caller; what is left is not
  // started.
  void work(int self) {
    try {
      for (int i = 0; i < threads_; ++i) {
        Share& share = shares_[(self + i) % threads_];
        for (;;) {
          const int64_t begin = share.next.fetch_add(step_, std::memory_order_relaxed);
          if (begin >= share.end) break;
          body_(context_, begin, std::min(begin + step_, share.end));
        }
      }
    } catch (...) {
      for (int i = 0; i < threads_; ++i) shares_[i].next.store(shares_[i].end);
      std::lock_guard<std::mutex> lock(failing_);
      if (failed_ == nullptr) failed_ = std::current_exception();
    }
  }

  void start_workers(int count) {
    for (; workers_ < count; ++workers_) {
      std::thread([this, self = workers_ + 1, seen = epoch_.load()]() mutable {
        inside = true;
        for (;;) {
          wait_for_work(seen);
          busy_.fetch_add(1);
          if (open_.load() && self < threads_) work(self);
          busy_.fetch_sub(1);
        }
      }).detach();
    }
  }

  // Returns with a new epoch in `seen`.
  void wait_for_work(uint64_t& seen) {
    if (spin_until([&] { return epoch_.load() != seen; })) {
      seen = epoch_.load();
      return;
    }
    std::unique_lock<std::mutex> lock(sleep_);
    sleeping_.fetch_add(1);
    wake_.wait(lock, [&] { return epoch_.load() != seen; });
    sleeping_.fetch_sub(1);
    seen = epoch_.load();
  }

  std::mutex one_caller_;
  int workers_ = 0;

  void (*body_)(void*, int64_t, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t step_ = 1;
  int threads_ = 1;
  Share shares_[kMaxThreads];
  std::mutex failing_;
  std::exception_ptr failed_;

  std::atomic<uint64_t> epoch_{0};
  std::atomic<bool> open_{false};
  std::atomic<int> busy_{0};
  std::atomic<int> sleeping_{0};
  std::mutex sleep_;
  std::condition_variable wake_;
};

// Never destroyed: detached workers use it until the process ends. A forked child has no workers and a fresh
// pool.
std::atomic<Pool*> pool{nullptr};

Pool& the_pool() {
  Pool* found = pool.load(std::memory_order_acquire);
  if (found == nullptr) {
    static std::mutex making;
    std::lock_guard<std::mutex> lock(making);
    found = pool.load(std::memory_order_acquire);
    if (found == nullptr) {
      found = new Pool;
#if defined(__unix__) || defined(__APPLE__)
      static const int registered = pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); });
      (void)registered;
#endif
      pool.store(found, std::memory_order_release);
    }
  }
  return *found;
}

}  // namespace

int max_threads() {
  if (inside) return 1;
#ifdef _OPENMP
  return omp_in_parallel() ? 1 : std::min(omp_get_max_threads(), kMaxThreads);
#else
  static const int cores =
      std::clamp<int>(static_cast<int>(std::thread::hardware_concurrency()), 1, kMaxThreads);
  return cores;
#endif
}

void run_parallel(int64_t n, int64_t step, int threads, void* context,
                  void (*body)(void* context, int64_t begin, int64_t end)) {
  if (threads <= 1) {
    body(context, 0, n);
    return;
  }
  the_pool().run(n, step, threads, context, body);
}

}  // namespace specdec::cpu
