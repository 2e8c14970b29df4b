// What an execution found and counted.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "kernel.h"

namespace specdec::simt {

enum class FindingKind : int32_t {
  kRace,            // two threads, one place in shared memory, one of them writes, nothing orders them
  kOutOfBounds,     // outside the buffer, or the array of shared memory, that the pointer came from
  kMisaligned,      // a vector access at an address that is no multiple of its size
  kUninitialized,   // a read of shared memory or of an output where nobody wrote
  kReadOnly,        // a write to an input
  kAsyncNotWaited,  // an access under an asynchronous copy, or a copy that nobody waited for
  kBarrier,         // a barrier that not all reach, or reach in different places
  kAbsentLanes,     // a shuffle, vote or matrix operation that not all lanes of the warp take part in
  kDeadlock,        // blocks that wait for flags that nobody sets
};

const char* name_of(FindingKind kind);

struct Finding {
  FindingKind kind{};
  std::string kernel;
  cuda::Index3 block{0, 0, 0};
  int thread = 0;
  std::string file;
  int line = 0;
  int other_thread = -1;  // the other party of a race; -1: none
  int other_line = 0;
  std::string text;   // what happened
  int64_t count = 0;  // times it happened at these lines

  std::string to_string() const;
};

// Sums over requests: the accesses of the lanes of a warp at one source line and one iteration, split as the
// hardware splits it, into 32 lanes of 4 bytes, 16 of 8 or 8 of 16.
struct GlobalTraffic {
  int64_t bytes = 0;     // an address counts once in a warp's access
  int64_t requests = 0;  // of up to 128 bytes
  int64_t sectors = 0;   // of 32 bytes, touched by a warp's access

  double sectors_per_request() const {
    return requests == 0 ? 0.0 : static_cast<double>(sectors) / static_cast<double>(requests);
  }
};

struct SharedTraffic {
  int64_t requests = 0;    // as above; each takes one wavefront if no two words lie in one bank
  int64_t wavefronts = 0;  // passes over the banks
  int64_t worst = 0;       // wavefronts of the worst request: 1: no conflicts, 2: two-way
};

struct LineCounts {
  std::string file;
  int line = 0;
  GlobalTraffic read, write;
  SharedTraffic shared;
};

struct BufferCounts {
  std::string name;
  int64_t bytes_read = 0, bytes_written = 0;
  // Of the distinct 32-byte sectors of a launch, whole: what memory has to move where the cache holds what
  // blocks share. Launches add up.
  int64_t footprint_read = 0, footprint_written = 0;
};

struct KernelCounts {
  std::string kernel;
  int64_t launches = 0, blocks = 0;
  int64_t shared_bytes = 0;  // dynamic shared memory of a block, the most of any launch
  GlobalTraffic read, write;
  int64_t footprint_read = 0, footprint_written = 0;  // of all buffers, as in BufferCounts
  SharedTraffic shared;
  int64_t async_bytes = 0;    // by asynchronous copies; they are in `read` too
  int64_t flag_accesses = 0;  // acquires, releases and atomics by threads; in no other count
  int64_t barriers = 0;       // block-wide and named, by blocks
  int64_t warp_barriers = 0;  // these and all below by warps
  int64_t shuffles = 0, votes = 0, mma_tf32 = 0, mma_bf16 = 0, load_matrices = 0;
  std::vector<BufferCounts> buffers;  // in the order of registration
  std::vector<LineCounts> lines;      // in the order of file and line
};

struct Report {
  std::vector<Finding> findings;
  bool findings_dropped = false;  // more were found than the limit
  std::vector<KernelCounts> kernels;
  int64_t primitive_calls = 0;

  bool clean() const { return findings.empty(); }
  const KernelCounts& kernel(const std::string& part_of_name) const;  // throws std::out_of_range
  int64_t count(FindingKind kind) const;                              // of distinct findings
  std::string to_string() const;
};

}  // namespace specdec::simt
