// How the CUDA benchmarks measure: calls over buffer sets that together exceed the L2 cache, captured in a
// graph and replayed, timed by events.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "../../../tests/cpp/gpu/device.h"
#include "specdec/types.h"

namespace specdec::bench {

// Buffer sets for a call that touches `bytes`: together three times the L2 cache, so that nothing a call
// needs is left from the round before; at most what half of the free memory holds. 0: not even one fits.
int64_t rotation(double bytes);

// Where everything runs. What was copied or set before by the runtime's default stream may still be under
// way.
cudaStream_t stream();

// One call on buffer set `set`.
using Call = std::function<Status(int64_t set, cudaStream_t stream)>;

struct Time {
  double us = 0.0;    // a call, median over replays; negative: failed
  std::string error;  // of the launch or the capture
};

// A graph of one call a set, replayed `replays` times.
Time replay(const Call& call, int64_t sets, int replays = 25);

// GB/s of a large copy from device memory to device memory, bytes read and written; measured once a run.
double copy_rate();

// Numbers in [-1, 1) times `scale` plus `shift`: random ones for the first 256 KiB, repeated beyond.
void fill(gpu::DeviceMemory& memory, DType dtype, double scale, double shift, unsigned seed);

// Registers `name`, whose body returns the time of a call and the bytes that it moves at least. `steps`: time
// of the same work in single steps, 0 where that makes no sense; a failure of theirs is one of the benchmark.
struct Result {
  Time time;
  double bytes = 0.0;
  Time steps = {};

  const Time& failure() const { return time.us < 0.0 ? time : steps; }  // where there is one: its `us` < 0
};
void add(const std::string& name, std::function<Result()> body);

// Whether a benchmark was wrong or could not run, but for memory too small.
bool failed();
inline const char kTooSmall[] = "the device's memory is too small";

// Benchmarks of each op.
void add_verify();
void add_commit();
void add_convolution();
void add_layer();
void add_prefill();
void add_acceptance();

}  // namespace specdec::bench
