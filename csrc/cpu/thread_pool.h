// Worker threads that a caller never waits for unless they are in the middle of its work.
#pragma once

#include <cstdint>

namespace specdec::cpu {

// Threads a call may use: OpenMP's count, which inside a Python process is torch's (the symbols resolve to
// the runtime that torch has loaded), so torch.set_num_threads and OMP_NUM_THREADS govern both. 1 inside a
// parallel region, ours or OpenMP's.
int max_threads();

// Runs body(context, begin, end) over disjoint ranges that cover [0, n), on the caller and on workers;
// returns when all are done. Every thread starts in a share of its own, always the same one, in steps of
// `step`, and then helps with the shares of others. A body must not throw.
void run_parallel(int64_t n, int64_t step, int threads, void* context,
                  void (*body)(void* context, int64_t begin, int64_t end));

}  // namespace specdec::cpu
