// Threads. OpenMP where the compiler has it: inside a Python process its symbols resolve to the runtime that
// torch has already loaded, so both share one pool and torch.set_num_threads governs both.
#pragma once

#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace specdec::cpu {

static inline int max_threads() {  // static: one copy a file, never an AVX-512 copy for all
#ifdef _OPENMP
  return omp_in_parallel() ? 1 : omp_get_max_threads();
#else
  return 1;
#endif
}

constexpr int64_t kParallelWork = 32768;

// Runs f(i) for i in [0, n), each i once, in any order. `work` is a rough count of multiply-adds in all:
// below kParallelWork a second thread costs more than it brings.
template <typename F>
inline void parallel_for(int64_t n, int64_t work, F&& f) {
#ifdef _OPENMP
  if (n > 1 && work >= kParallelWork && omp_get_max_threads() > 1 && !omp_in_parallel()) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; ++i) f(i);
    return;
  }
#endif
  (void)work;
  for (int64_t i = 0; i < n; ++i) f(i);
}

// Cuts [0, n) into one contiguous range a thread and runs f(begin, end) on each: for kernels that prepare
// something once a thread. `work` as above.
template <typename F>
inline void parallel_ranges(int64_t n, int64_t work, F&& f) {
#ifdef _OPENMP
  if (n > 1 && work >= 262144 && omp_get_max_threads() > 1 && !omp_in_parallel()) {
#pragma omp parallel
    {
      const int64_t thread = omp_get_thread_num();
      const int64_t threads = omp_get_num_threads();
      f(n * thread / threads, n * (thread + 1) / threads);
    }
    return;
  }
#endif
  (void)work;
  f(0, n);
}

}  // namespace specdec::cpu
