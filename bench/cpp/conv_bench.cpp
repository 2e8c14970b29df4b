// conv_verify at the shape of the embedded model (C = 512, W = 4): one decode step, a verification, a
// prefill.
#include <benchmark/benchmark.h>

#include <vector>

#include "ops.h"

namespace {

void conv_verify(benchmark::State& run) {
  const int64_t N = run.range(0), C = 512, W = 4;
  std::vector<float> x(N * C, 0.5f), weight(C * W, 0.25f), state((W - 1) * C, 1.0f), y(N * C);
  specdec::ConvVerifyParams p;
  p.B = 1, p.N = N, p.C = C, p.W = W;
  p.x = {x.data(), specdec::DType::kFloat32, N, N * C, C};
  p.weight = weight.data();
  p.state = {state.data(), specdec::DType::kFloat32, 1, (W - 1) * C};
  p.y = y.data();
  for (auto _ : run) {
    if (specdec::cpu::conv_verify(p) != specdec::Status::kOk) run.SkipWithError("conv_verify failed");
    benchmark::ClobberMemory();
  }
  run.SetBytesProcessed(run.iterations() * 2 * N * C * sizeof(float));
}
BENCHMARK(conv_verify)->Arg(1)->Arg(4)->Arg(9)->Arg(64)->Arg(1024);

}  // namespace
