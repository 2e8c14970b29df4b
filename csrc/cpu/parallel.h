// Threads. OpenMP where the compiler has it: inside a Python process its symbols resolve to the runtime that
// torch has already loaded, so both share one pool and torch.set_num_threads governs both.
#pragma once

#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace specdec::cpu {

// Threads that parallel_for would use for `work`, see there.
static inline int64_t max_threads(int64_t work) {
#ifdef _OPENMP
  if (work >= 32768 && !omp_in_parallel()) return omp_get_max_threads();
#endif
  (void)work;
  return 1;
}

// Runs f(i) for i in [0, n), each i once, in any order. `work` is a rough count of multiply-adds in all:
// below a few ten thousand a second thread costs more than it brings.
template <typename F>
inline void parallel_for(int64_t n, int64_t work, F&& f) {
#ifdef _OPENMP
  if (n > 1 && work >= 32768 && omp_get_max_threads() > 1 && !omp_in_parallel()) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; ++i) f(i);
    return;
  }
#endif
  (void)work;
  for (int64_t i = 0; i < n; ++i) f(i);
}

}  // namespace specdec::cpu
