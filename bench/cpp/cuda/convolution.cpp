// conv_verify/SHAPE/B/N/pending: the short convolution of a layer of 8192 channels, width 4, bfloat16.
#include <algorithm>
#include <cmath>
#include <vector>

#include "../../../csrc/cpu/ops.h"
#include "../../../csrc/cuda/ops.h"
#include "../../../tests/cpp/buffer.h"
#include "measure.h"

namespace specdec::bench {
namespace {

using gpu::check;
using gpu::DeviceMemory;

constexpr int64_t kChannels = 8192, kWidth = 4, kPending = 4;

struct Convolutions {
  Convolutions(int64_t B_, int64_t N_) : B(B_), N(N_) {
    sets = rotation(static_cast<double>(2 * B * kChannels * (2 * N + kPending + kWidth - 1)));
    if (sets <= 0) return;
    const auto make = [&](int64_t bytes, DType dtype, unsigned seed) {
      DeviceMemory memory(static_cast<size_t>(bytes));
      fill(memory, dtype, 1.0, 0.0, seed);
      return memory;
    };
    x = make(sets * tokens(N), DType::kBFloat16, 1),
    pending = make(sets * tokens(kPending), DType::kBFloat16, 2);
    state = make(sets * tokens(kWidth - 1), DType::kBFloat16, 3);
    weight = make(4 * kChannels * kWidth, DType::kFloat32, 4);
    y = DeviceMemory(static_cast<size_t>(sets * tokens(N)));
    std::vector<int32_t> tree;
    for (int64_t i = 0; i < B * N; ++i) tree.push_back(static_cast<int32_t>((i % N + 1) / 2 - 1));
    parents = DeviceMemory(tree.size() * 4);
    check(cudaMemcpy(parents.data(), tree.data(), parents.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
  }

  int64_t tokens(int64_t n) const { return 2 * B * n * kChannels; }  // bytes
  ConvInputView input(const DeviceMemory& memory, int64_t set, int64_t n) const {
    return {static_cast<char*>(memory.data()) + set * tokens(n), DType::kBFloat16, n, n * kChannels,
            kChannels};
  }

  ConvVerifyParams params(int64_t set, bool tree, int64_t factors) const {
    ConvVerifyParams p;
    p.B = B, p.N = N, p.C = kChannels, p.W = kWidth;
    p.x = input(x, set, N);
    p.weight = static_cast<const float*>(weight.data());
    p.state = {static_cast<char*>(state.data()) + set * tokens(kWidth - 1), DType::kBFloat16, B,
               (kWidth - 1) * kChannels};
    if (tree) p.parents = static_cast<const int32_t*>(parents.data());
    p.has_pending = factors > 0;
    if (factors > 0) {
      p.pending = input(pending, set, kPending);
      p.pending_path.max_length = factors;
    }
    p.y = static_cast<char*>(y.data()) + set * tokens(N);
    return p;
  }

  // As Layers::wrong.
  std::string wrong(const ConvVerifyParams& p) const {
    const auto row = [&](const void* data, int64_t bytes) {
      std::vector<char> host(static_cast<size_t>(bytes));
      check(cudaMemcpy(host.data(), static_cast<const char*>(data) + (B - 1) * bytes, host.size(),
                       cudaMemcpyDeviceToHost),
            "cudaMemcpy");
      return host;
    };
    check(cudaMemset(p.y, 0xff, static_cast<size_t>(tokens(N))), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaMemset");
    std::vector<float> w(static_cast<size_t>(kChannels * kWidth));
    check(cudaMemcpy(w.data(), weight.data(), weight.bytes(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    const std::vector<char> inputs = row(p.x.x, tokens(N) / B);
    std::vector<char> window = row(p.state.data, tokens(kWidth - 1) / B), factors, tree, want(inputs.size());
    ConvVerifyParams c = p;
    c.B = 1;
    c.x.x = inputs.data(), c.weight = w.data(), c.state.data = window.data(), c.state.slots = 1;
    if (p.has_pending) {
      factors = row(p.pending.x, tokens(kPending) / B);
      c.pending.x = factors.data();
    }
    if (p.parents != nullptr) {
      tree = row(p.parents, N * 4);
      c.parents = reinterpret_cast<const int32_t*>(tree.data());
    }
    c.y = want.data();
    if (cpu::conv_verify(c) != Status::kOk) return "the CPU backend refuses the shape";
    if (cuda::conv_verify(p, stream()) != Status::kOk) return "the CUDA backend refuses the shape";
    check(cudaDeviceSynchronize(), "conv_verify");
    const std::vector<char> got = row(p.y, tokens(N) / B);
    for (int64_t i = 0; i < N * kChannels; ++i) {
      // Four products of up to 1 and SiLU in float32, then a bfloat16 that may round the other way.
      const double a = test::widen(got.data(), DType::kBFloat16, i),
                   b = test::widen(want.data(), DType::kBFloat16, i);
      if (!(std::abs(a - b) <= 0x1p-7 * std::abs(b) + 0x1p-20)) {
        return "y is wrong: " + std::to_string(a) + ", the CPU backend has " + std::to_string(b);
      }
    }
    return window == row(p.state.data, tokens(kWidth - 1) / B) ? "" : "the window is wrong";
  }

  int64_t B, N, sets;
  DeviceMemory x, pending, state, weight, y, parents;
};

Time measure(const Convolutions& layers, bool tree, int64_t factors) {
  const std::string fault = layers.wrong(layers.params(0, tree, factors));
  if (!fault.empty()) return {-1.0, fault};
  return replay(
      [&](int64_t set, cudaStream_t s) { return cuda::conv_verify(layers.params(set, tree, factors), s); },
      layers.sets);
}

}  // namespace

void add_convolution() {
  for (const int64_t B : {1, 32, 256}) {
    for (const int64_t N : {1, 8, 32}) {
      for (const bool tree : {false, true}) {
        for (const int64_t factors : {int64_t{0}, kPending}) {
          if (tree && N == 1) continue;
          add(std::string("conv_verify/") + (tree ? "tree" : "chain") + "/B:" + std::to_string(B) +
                  "/N:" + std::to_string(N) + "/pending:" + std::to_string(factors),
              [=]() -> Result {
                const Convolutions layers(B, N), steps(B, 1);
                if (layers.sets <= 0 || steps.sets <= 0) return {{-1.0, kTooSmall}};
                const Time time = measure(layers, tree, factors);
                Time single = measure(steps, false, 1);
                single.us *= static_cast<double>(N);
                // The window, and of pending inputs those that move into it.
                const int64_t window = kWidth - 1 + std::min(factors, kWidth - 1);
                const double bytes = static_cast<double>(2 * layers.tokens(N) + layers.tokens(window) +
                                                         4 * kChannels * kWidth);
                return {time, bytes, single};
              });
        }
      }
    }
  }
}

}  // namespace specdec::bench
