// The matrix forms beside stepping, H = 8, DK = DV = 256, float32, batch 1.
//
//   verify_<strategy>/N    one verification of N tokens, a chain
//   prefill/T/channel      one prefill of T tokens
//   prefill_by_steps/T     the same tokens by single-token verifications, each with the commit of the one
//                          before
#include <benchmark/benchmark.h>

#include <random>
#include <vector>

#include "ops.h"

namespace {

using namespace specdec;

constexpr int64_t kHeads = 8, kKey = 256, kValue = 256;

struct Tokens {
  explicit Tokens(int64_t n, bool channel = false) : n(n) {
    rec = {channel ? Gate::kChannel : Gate::kHead, Update::kDelta, kHeads, kHeads, kKey, kValue};
    std::mt19937 rng(0);
    std::normal_distribution<float> normal;
    for (auto* x : {&q, &k, &v}) {
      for (int64_t i = 0; i < n * kHeads * kKey; ++i) x->push_back(normal(rng));
    }
    g.assign(n * kHeads * (channel ? kKey : 1), -0.05f);
    beta.assign(n * kHeads, 0.5f);
    state.assign(kHeads * kKey * kValue, 0.1f);
    out.resize(n * kHeads * kValue);
    k_out.resize(n * kHeads * kKey);
    u_out.resize(n * kHeads * kValue);
    g_out.resize(g.size());
  }

  template <typename Params>
  void fill(Params& p) {
    p.rec = rec;
    p.B = 1;
    p.q = q.data(), p.k = k.data(), p.v = v.data(), p.g = g.data(), p.beta = beta.data();
    const int64_t gates = static_cast<int64_t>(g.size()) / n;
    p.q_stride = p.k_stride = {n * kHeads * kKey, kHeads * kKey, kKey};
    p.v_stride = {n * kHeads * kValue, kHeads * kValue, kValue};
    p.g_stride = {n * gates, gates, gates / kHeads};
    p.beta_stride = {n * kHeads, kHeads, 1};
    p.scale = 0.0625f;
    p.qk_l2norm = true;
    p.state = {state.data(), DType::kFloat32, 1, kHeads * kKey * kValue};
    p.out = out.data();
  }

  VerifyParams verify(Strategy strategy) {
    VerifyParams p;
    fill(p);
    p.N = n;
    p.k_out = k_out.data(), p.u_out = u_out.data(), p.g_out = g_out.data();
    p.strategy = strategy;
    return p;
  }

  int64_t n;
  Recurrence rec;
  std::vector<float> q, k, v, g, beta, state, out, k_out, u_out, g_out;
};

void verify(benchmark::State& run, Strategy strategy) {
  Tokens tokens(run.range(0));
  const VerifyParams p = tokens.verify(strategy);
  for (auto _ : run) {
    if (cpu::verify(p) != Status::kOk) run.SkipWithError("verify failed");
  }
  run.SetItemsProcessed(run.iterations() * tokens.n);
}
BENCHMARK_CAPTURE(verify, serial, Strategy::kSerial)->RangeMultiplier(2)->Range(1, 64);
BENCHMARK_CAPTURE(verify, solve, Strategy::kSolve)->RangeMultiplier(2)->Range(1, 256);

void prefill(benchmark::State& run) {
  Tokens tokens(run.range(0), run.range(1) != 0);
  PrefillParams p;
  tokens.fill(p);
  p.T = tokens.n;
  for (auto _ : run) {
    if (cpu::prefill(p) != Status::kOk) run.SkipWithError("prefill failed");
  }
  run.SetItemsProcessed(run.iterations() * tokens.n);
}
BENCHMARK(prefill)->ArgsProduct({{64, 512}, {0, 1}})->Unit(benchmark::kMillisecond);

void prefill_by_steps(benchmark::State& run) {
  Tokens tokens(run.range(0));
  for (auto _ : run) {
    VerifyParams p = tokens.verify(Strategy::kSerial);
    p.N = 1;
    p.pending_path.max_length = 1;
    for (int64_t t = 0; t < tokens.n; ++t) {
      p.q = tokens.q.data() + t * kHeads * kKey;
      p.k = tokens.k.data() + t * kHeads * kKey;
      p.v = tokens.v.data() + t * kHeads * kValue;
      p.k_out = tokens.k_out.data() + t * kHeads * kKey;
      p.u_out = tokens.u_out.data() + t * kHeads * kValue;
      p.g_out = tokens.g_out.data() + t * kHeads;
      p.has_pending = t > 0;
      if (t > 0) p.pending = {p.k_out - kHeads * kKey, p.u_out - kHeads * kValue, p.g_out - kHeads, 1};
      if (cpu::verify(p) != Status::kOk) run.SkipWithError("verify failed");
    }
  }
  run.SetItemsProcessed(run.iterations() * tokens.n);
}
BENCHMARK(prefill_by_steps)->Arg(64)->Unit(benchmark::kMillisecond);

}  // namespace
