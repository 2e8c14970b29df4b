// Loops over threads, for kernel files.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "thread_pool.h"

namespace specdec::cpu {

// Multiply-adds below which a second thread costs more than it brings.
constexpr int64_t kParallelWork = 32768;

// Runs f(i) for i in [0, n), each i once, in any order. `work` is a rough count of multiply-adds in all.
template <typename F>
inline void parallel_for(int64_t n, int64_t work, F&& f) {
  const int threads =
      n > 1 && work >= kParallelWork ? static_cast<int>(std::min<int64_t>(n, max_threads())) : 1;
  if (threads == 1) {
    for (int64_t i = 0; i < n; ++i) f(i);
    return;
  }
  const int64_t step = std::max<int64_t>(1, n / (8 * threads));
  using Body = std::remove_reference_t<F>;
  run_parallel(n, step, threads, const_cast<void*>(static_cast<const void*>(std::addressof(f))),
               [](void* context, int64_t begin, int64_t end) {
                 Body& body = *static_cast<Body*>(context);
                 for (int64_t i = begin; i < end; ++i) body(i);
               });
}

// Cuts [0, n) into a few contiguous ranges a thread and runs f(begin, end) on each: for kernels that prepare
// something once a range. `work` as above.
template <typename F>
inline void parallel_ranges(int64_t n, int64_t work, F&& f) {
  const int threads =
      n > 1 && work >= 8 * kParallelWork ? static_cast<int>(std::min<int64_t>(n, max_threads())) : 1;
  if (threads == 1) {
    f(static_cast<int64_t>(0), n);
    return;
  }
  const int64_t step = std::max<int64_t>(1, (n + 2 * threads - 1) / (2 * threads));
  using Body = std::remove_reference_t<F>;
  run_parallel(n, step, threads, const_cast<void*>(static_cast<const void*>(std::addressof(f))),
               [](void* context, int64_t begin, int64_t end) { (*static_cast<Body*>(context))(begin, end); });
}

}  // namespace specdec::cpu
