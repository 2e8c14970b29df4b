// linear at the sizes of a small Gated DeltaNet (256 -> 776, 1024, 4096; 512 -> 256) and of a 135M model's
// head. Bytes are those of the weight: what one decode step must read.
#include <benchmark/benchmark.h>

#include <random>
#include <vector>

#include "ops.h"

namespace {

using specdec::DType;

// Weights in rotation, so that they come from beyond the second-level cache as in a model.
constexpr int64_t kPoolBytes = 32 << 20;

void linear(benchmark::State& state, DType dtype) {
  const int64_t rows = state.range(0), K = state.range(1), N = state.range(2);
  const int64_t panels = (N + specdec::kPanelWidth - 1) / specdec::kPanelWidth;
  const int64_t bytes = panels * K * specdec::kPanelWidth * (dtype == DType::kFloat32 ? 4 : 2);
  const int64_t copies = std::max<int64_t>(1, kPoolBytes / bytes);
  std::vector<float> x(rows * K), y(rows * N);
  std::mt19937 engine(1);
  std::normal_distribution<float> normal;
  for (float& v : x) v = normal(engine);
  // 0x3c3c is 0.0115 as bfloat16, 0x3c3c3c3c much the same as float32.
  std::vector<char> weights(copies * bytes, 0x3c);
  specdec::LinearParams p;
  p.K = K;
  p.N = N;
  p.x.data = x.data();
  p.x.rows = p.x.inner = rows;
  p.x.stride_inner = K;
  p.weight_dtype = dtype;
  p.y = y.data();
  int64_t copy = 0;
  for (auto _ : state) {
    p.weight = weights.data() + copy * bytes;
    copy = (copy + 1) % copies;
    if (specdec::cpu::linear(p) != specdec::Status::kOk) state.SkipWithError("no kernel");
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * bytes);
  state.counters["GFLOP/s"] =
      benchmark::Counter(2e-9 * static_cast<double>(rows * K * N) * static_cast<double>(state.iterations()),
                         benchmark::Counter::kIsRate);
}

void sizes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"rows", "in", "out"})->UseRealTime();
  for (const auto& [K, N] : {std::pair<int64_t, int64_t>{256, 776}, {256, 1024}, {512, 256}, {256, 4096}}) {
    for (int64_t rows : {1, 2, 4, 8, 9, 16, 64, 512}) bench->Args({rows, K, N});
  }
  for (int64_t rows : {1, 9}) bench->Args({rows, 576, 49152});
}

BENCHMARK_CAPTURE(linear, float32, DType::kFloat32)->Apply(sizes);
BENCHMARK_CAPTURE(linear, bfloat16, DType::kBFloat16)->Apply(sizes);

void rms_norm(benchmark::State& state) {
  const int64_t rows = state.range(0), D = state.range(1);
  std::vector<float> x(rows * D, 0.5f), weight(D, 1.0f), y(rows * D);
  specdec::RmsNormParams p;
  p.D = D;
  p.x.data = x.data();
  p.x.rows = p.x.inner = rows;
  p.x.stride_inner = D;
  p.gate = p.x;
  p.has_gate = state.range(2) != 0;
  p.weight = weight.data();
  p.eps = 1e-6f;
  p.y = y.data();
  for (auto _ : state) {
    if (specdec::cpu::rms_norm(p) != specdec::Status::kOk) state.SkipWithError("no kernel");
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * rows * D * 4 * (p.has_gate ? 3 : 2));
}

BENCHMARK(rms_norm)
    ->ArgNames({"rows", "D", "gate"})
    ->ArgsProduct({{1, 9, 512}, {64, 256}, {0, 1}})
    ->UseRealTime();

}  // namespace
