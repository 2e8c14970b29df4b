// Every index is run exactly once: alone, from several callers at a time, from within a body, and in a forked
// child.
#include "thread_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <new>
#include <thread>
#include <vector>

#include "parallel.h"

namespace specdec::cpu {
namespace {

struct Counts {
  explicit Counts(int64_t n) : hits(n) {}
  std::vector<std::atomic<int>> hits;
  static void body(void* context, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) static_cast<Counts*>(context)->hits[i].fetch_add(1);
  }
  bool each_once() const {
    for (const auto& hit : hits) {
      if (hit.load() != 1) return false;
    }
    return true;
  }
};

TEST(ThreadPool, RunsEveryIndexOnce) {
  for (int threads : {1, 2, 3, 7}) {
    for (int64_t n : {0, 1, 2, 5, 64, 1001}) {
      for (int64_t step : {1, 3, 1000}) {
        Counts counts(n);
        run_parallel(n, step, threads, &counts, &Counts::body);
        EXPECT_TRUE(counts.each_once()) << n << " items, step " << step << ", " << threads << " threads";
      }
    }
  }
}

TEST(ThreadPool, ManyShortCalls) {
  for (int i = 0; i < 20000; ++i) {
    Counts counts(5);
    run_parallel(5, 1, 3, &counts, &Counts::body);
    ASSERT_TRUE(counts.each_once()) << "call " << i;
    if (i % 5000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));  // workers fall asleep
  }
}

TEST(ThreadPool, CallersAtTheSameTime) {
  std::atomic<int> bad{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&bad] {
      for (int i = 0; i < 2000; ++i) {
        Counts counts(9);
        run_parallel(9, 2, 2, &counts, &Counts::body);
        if (!counts.each_once()) bad.fetch_add(1);
      }
    });
  }
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(bad.load(), 0);
}

TEST(ThreadPool, NoThreadsWithinABody) {
  std::vector<int> inner(8, 0);
  run_parallel(8, 1, 2, &inner, [](void* context, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) (*static_cast<std::vector<int>*>(context))[i] = max_threads();
  });
  EXPECT_EQ(inner, std::vector<int>(8, 1));
}

// Scratch that cannot be had throws inside a body, on any thread: the caller gets the exception, the pool
// works on.
TEST(ThreadPool, ExceptionReachesTheCaller) {
  for (int round = 0; round < 200; ++round) {
    std::vector<std::atomic<int>> ran(64);
    EXPECT_THROW(run_parallel(64, 1, 2, &ran,
                              [](void* context, int64_t begin, int64_t) {
                                (*static_cast<std::vector<std::atomic<int>>*>(context))[begin].fetch_add(1);
                                if (begin % 32 == 5) throw std::bad_alloc();
                              }),
                 std::bad_alloc);
    for (const auto& count : ran) EXPECT_LE(count.load(), 1);
    EXPECT_GE(max_threads(), 1);
    Counts counts(64);
    run_parallel(64, 1, 2, &counts, &Counts::body);
    EXPECT_TRUE(counts.each_once());
  }
}

TEST(ThreadPool, WorksInAForkedChild) {
  Counts before(16);
  run_parallel(16, 1, 2, &before, &Counts::body);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    Counts counts(64);
    run_parallel(64, 1, 2, &counts, &Counts::body);
    _exit(counts.each_once() ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace specdec::cpu
