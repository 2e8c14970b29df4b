// Exact verification and commits through the C++ entry points, no torch. Calls rotate over the states of 24
// layers, which together exceed the second-level cache as the layers of a model do. Time is per call (per 8
// tokens where the name says so); bytes are the state's reads and writes that the call cannot avoid. For
// ratios run
//   specdec_bench --benchmark_filter=... --benchmark_enable_random_interleaving=true
//   --benchmark_repetitions=9
#include <benchmark/benchmark.h>

#include <cmath>
#include <random>
#include <vector>

#include "ops.h"

namespace specdec {
namespace {

constexpr int64_t kLayers = 24;

// Gated delta rule in float32, B sequences, one state pool a layer.
struct Layers {
  int64_t B, N, H, D;
  std::vector<float> q, k, v, g, beta, out, k_out, u_out, g_out;
  std::vector<float> state;  // [kLayers, B, H, D, D]
  std::vector<int32_t> one;
  int64_t layer = 0;

  Layers(int64_t B_, int64_t N_, int64_t H_, int64_t D_) : B(B_), N(N_), H(H_), D(D_), one(B_, 1) {
    std::mt19937 random(1);
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    const auto fill = [&](std::vector<float>& x, int64_t n, float bias = 0.0f) {
      x.resize(n);
      for (float& e : x) e = uniform(random) + bias;
    };
    fill(q, B * N * H * D), fill(k, B * N * H * D), fill(v, B * N * H * D);
    fill(g, B * N * H, -1.0f);
    fill(beta, B * N * H);
    fill(state, kLayers * B * H * D * D);
    for (float& x : beta) x = std::fabs(x);
    out.resize(v.size()), u_out.resize(v.size()), k_out.resize(k.size()), g_out.resize(g.size());
    // Factors of a call, so that commits may come first.
    cpu::verify(verify(N, Strategy::kSerial));
  }

  float* current() { return state.data() + layer * B * H * D * D; }
  void next() { layer = (layer + 1) % kLayers; }
  Recurrence recurrence() const { return {Gate::kHead, Update::kDelta, H, H, D, D}; }
  StateView view() { return {current(), DType::kFloat32, B, H * D * D}; }
  FactorsView factors(int64_t nodes) const { return {k_out.data(), u_out.data(), g_out.data(), nodes}; }
  double state_bytes() const { return static_cast<double>(B * H * D * D * 4); }

  VerifyParams verify(int64_t nodes, Strategy strategy) {
    VerifyParams p;
    p.rec = recurrence();
    p.B = B, p.N = nodes;
    p.q = q.data(), p.k = k.data(), p.v = v.data(), p.g = g.data(), p.beta = beta.data();
    p.q_stride = p.k_stride = p.v_stride = {N * H * D, H * D, D};
    p.g_stride = p.beta_stride = {N * H, H, 1};
    p.scale = 1.0f / std::sqrt(static_cast<float>(D));
    p.qk_l2norm = true;
    p.state = view();
    p.out = out.data(), p.k_out = k_out.data(), p.u_out = u_out.data(), p.g_out = g_out.data();
    p.strategy = strategy;
    return p;
  }
  CommitParams commit(int64_t nodes, CommitMode mode) {
    CommitParams p;
    p.rec = recurrence();
    p.B = B;
    p.factors = factors(nodes);
    p.path.max_length = nodes;
    p.state = view();
    p.mode = mode;
    return p;
  }
};

void finish(benchmark::State& state, Layers& layers, double state_passes) {
  state.counters["state_GB/s"] = benchmark::Counter(state_passes * layers.state_bytes() * 1e-9,
                                                    benchmark::Counter::kIsIterationInvariantRate);
}

Layers layers_of(const benchmark::State& state) {
  return Layers(state.range(0), state.range(1), state.range(2), state.range(3));
}

template <Strategy kStrategy>
void Verify(benchmark::State& state) {
  Layers layers = layers_of(state);
  for (auto _ : state) {
    cpu::verify(layers.verify(layers.N, kStrategy));
    layers.next();
  }
  finish(state, layers, 1);
}

// A binary tree of the same nodes.
template <Strategy kStrategy>
void VerifyTree(benchmark::State& state) {
  Layers layers = layers_of(state);
  std::vector<int32_t> parents;
  for (int64_t b = 0; b < layers.B; ++b) {
    for (int64_t n = 0; n < layers.N; ++n) parents.push_back(static_cast<int32_t>((n + 1) / 2 - 1));
  }
  for (auto _ : state) {
    VerifyParams p = layers.verify(layers.N, kStrategy);
    p.parents = parents.data();
    cpu::verify(p);
    layers.next();
  }
  finish(state, layers, 1);
}

// N decode steps: verification of one token with the token before pending. A layer sees one step, then the
// next layer.
void Steps(benchmark::State& state) {
  Layers layers = layers_of(state);
  for (auto _ : state) {
    for (int64_t n = 0; n < layers.N; ++n) {
      VerifyParams p = layers.verify(1, Strategy::kSerial);
      p.has_pending = true;
      p.pending = layers.factors(1);
      p.pending_path = {nullptr, layers.one.data(), 1};
      // The factors written are those of the next token; the pending ones lie in another bank.
      p.k_out = layers.k_out.data() + layers.B * layers.H * layers.D;
      p.u_out = layers.u_out.data() + layers.B * layers.H * layers.D;
      cpu::verify(p);
      layers.next();
    }
  }
  finish(state, layers, 2 * static_cast<double>(layers.N));
}

template <CommitMode kMode>
void Commit(benchmark::State& state) {
  Layers layers = layers_of(state);
  for (auto _ : state) {
    cpu::commit(layers.commit(layers.N, kMode));
    layers.next();
  }
  finish(state, layers, 2);
}

// N tokens folded in one at a time.
void Replay(benchmark::State& state) {
  Layers layers = layers_of(state);
  for (auto _ : state) {
    for (int64_t n = 0; n < layers.N; ++n) {
      cpu::commit(layers.commit(1, CommitMode::kExact));
      layers.next();
    }
  }
  finish(state, layers, 2 * static_cast<double>(layers.N));
}

void CommitThenVerify(benchmark::State& state) {
  Layers layers = layers_of(state);
  Layers previous = layers_of(state);
  for (auto _ : state) {
    CommitParams c = layers.commit(layers.N, CommitMode::kExact);
    c.factors = previous.factors(layers.N);
    cpu::commit(c);
    cpu::verify(layers.verify(layers.N, Strategy::kSerial));
    layers.next();
  }
  finish(state, layers, 3);
}

void Deferred(benchmark::State& state) {
  Layers layers = layers_of(state);
  Layers previous = layers_of(state);
  for (auto _ : state) {
    VerifyParams p = layers.verify(layers.N, Strategy::kSerial);
    p.has_pending = true;
    p.pending = previous.factors(layers.N);
    p.pending_path.max_length = layers.N;
    cpu::verify(p);
    layers.next();
  }
  finish(state, layers, 2);
}

// Arguments: B, N, heads, DK = DV.
void shapes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"B", "N", "H", "D"})->UseRealTime()->Unit(benchmark::kMicrosecond);
  b->Args({1, 8, 8, 256});
}
void many_shapes(benchmark::internal::Benchmark* b) {
  shapes(b);
  for (const int64_t n : {1, 4, 9}) b->Args({1, n, 4, 64});  // the embedded model
  for (const int64_t n : {1, 2, 16, 64}) b->Args({1, n, 8, 256});
  b->Args({8, 8, 8, 128});
}

BENCHMARK_TEMPLATE(Verify, Strategy::kSerial)->Apply(many_shapes);
BENCHMARK_TEMPLATE(Verify, Strategy::kHybrid)->Apply(shapes);
BENCHMARK_TEMPLATE(VerifyTree, Strategy::kSerial)->Apply(many_shapes);
BENCHMARK_TEMPLATE(VerifyTree, Strategy::kHybrid)->Apply(many_shapes);
BENCHMARK(Steps)->Apply(shapes);
BENCHMARK_TEMPLATE(Commit, CommitMode::kExact)->Apply(many_shapes);
BENCHMARK_TEMPLATE(Commit, CommitMode::kFast)->Apply(shapes);
BENCHMARK(Replay)->Apply(shapes);
BENCHMARK(CommitThenVerify)->Apply(shapes);
BENCHMARK(Deferred)->Apply(shapes);

}  // namespace
}  // namespace specdec
