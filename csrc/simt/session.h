// Runs kernels and keeps what they did. It stands where a stream stands on the GPU: the memory that kernels
// may touch, the options of the execution, and the report over everything that ran.
#pragma once

#include <cstdint>
#include <memory>

#include "kernel.h"
#include "memory.h"
#include "report.h"
#include "requests.h"
#include "specdec/types.h"

namespace specdec::simt {

struct Options {
  uint64_t seed = 0;                 // orders blocks, warps and lanes
  int resident_blocks = 16;          // blocks that may wait for each other's flags at a time
  int64_t shared_limit = 163 << 10;  // bytes of shared memory that a block may have: sm_80's
  int finding_limit = 100;
};

class Session {
 public:
  explicit Session(Options options = {}) : options(options) {}

  // Executes body(params) by every thread of the grid. Findings do not change the status. One launch runs at
  // a time in a process.
  Status run(const char* kernel, cuda::Index3 grid, int threads, int64_t shared_bytes,
             void (*body)(const void*), const void* params);

  Memory memory;
  Options options;
  Report report;
  Places places;

 private:
  uint32_t launches_ = 0;
};

}  // namespace specdec::simt
