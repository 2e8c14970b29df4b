// Runs a function as a kernel on a few buffers.
#pragma once

#include <cstdint>
#include <vector>

#include "launch.cuh"

namespace specdec::cuda {

struct TestBuffers {
  const float* in = nullptr;
  const bfloat16* narrow = nullptr;
  float* out = nullptr;
  int32_t* flags = nullptr;
  int32_t blocks = 1;
  int64_t shared_bytes = 16384;
};

using TestBody = void (*)(const TestBuffers&, SharedArena);

template <TestBody Body, int Threads>
struct TestKernel {
  using Params = TestBuffers;
  static constexpr int kThreads = Threads;
  static Launch shape(const Params& p) { return {{p.blocks, 1, 1}, p.shared_bytes}; }
  static void run(const Params& p, SharedArena shared) { Body(p, shared); }
};

// A session with an input of small whole numbers (1, 2, 3, ...), an output and zeroed flags.
struct TestSession : simt::Session {
  static constexpr int kElements = 4096;

  explicit TestSession(uint64_t seed = 0)
      : simt::Session(with_seed(seed)), in(kElements), narrow(kElements), out(kElements), flags(64) {
    for (int i = 0; i < kElements; ++i) {
      in[static_cast<size_t>(i)] = static_cast<float>(i + 1);
      narrow[static_cast<size_t>(i)] = round_to<bfloat16>(static_cast<float>(i % 251 + 1));
    }
    memory.add("in", in.data(), in.size(), simt::Direction::kInput);
    memory.add("narrow", narrow.data(), narrow.size(), simt::Direction::kInput);
    memory.add("out", out.data(), out.size(), simt::Direction::kOutput);
    memory.add("flags", flags.data(), flags.size(), simt::Direction::kBoth);
    buffers = {in.data(), narrow.data(), out.data(), flags.data()};
  }

  template <TestBody Body, int Threads = 128>
  Status run(int blocks = 1) {
    buffers.blocks = blocks;
    return launch<TestKernel<Body, Threads>>(buffers, this);
  }

  std::vector<float> in;
  std::vector<bfloat16> narrow;
  std::vector<float> out;
  std::vector<int32_t> flags;
  TestBuffers buffers;

 private:
  static simt::Options with_seed(uint64_t seed) {
    simt::Options options;
    options.seed = seed;
    return options;
  }
};

}  // namespace specdec::cuda
