// Runs standard shapes of every op of the CUDA backend through the executor and prints, as JSON, what each
// kernel moved: bytes counted and least possible, sectors a request, bank conflicts, arithmetic.
// tools/kernel_report.py reads it. The listed shapes are those of a Gated DeltaNet layer with heads of 128,
// few enough heads to run in seconds: counts scale with sequences and heads. Others, not listed, are small
// and there to run every instance.
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "dispatch_tiles.cuh"
#include "layer_limits.h"
#include "ops.h"
#include "session.h"

namespace specdec::cuda {
namespace {

// One op on one shape: its buffers, and of each the bytes that have to be read and written at least.
class Run {
 public:
  Run(std::string op, std::string shape, double flops, bool listed = true)
      : op_(std::move(op)), shape_(std::move(shape)), flops_(flops), listed_(listed) {}

  // A buffer of random numbers in [-1, 1] that is read once.
  float* input(const char* name, int64_t count) {
    float* data = reals(count);
    add(name, data, count, simt::Direction::kInput, 1, 0);
    return data;
  }
  // Of 16 bits: zeros.
  void* input(const char* name, int64_t count, DType dtype) {
    if (dtype == DType::kFloat32) return input(name, count);
    return zeros(name, count, simt::Direction::kInput, 1, 0);
  }
  template <typename T>
  T* indices(const char* name, const std::vector<T>& values) {
    T* data = reinterpret_cast<T*>(raw(static_cast<int64_t>(values.size() * sizeof(T))));
    std::copy(values.begin(), values.end(), data);
    add(name, data, static_cast<int64_t>(values.size()), simt::Direction::kInput, 1, 0);
    return data;
  }
  template <typename T>
  T* output(const char* name, int64_t count) {
    T* data = reinterpret_cast<T*>(raw(count * static_cast<int64_t>(sizeof(T))));
    add(name, data, count, simt::Direction::kOutput, 0, 1);
    return data;
  }
  void* output(const char* name, int64_t count, DType dtype) {
    if (dtype == DType::kFloat32) return output<float>(name, count);
    return zeros(name, count, simt::Direction::kOutput, 0, 1);
  }
  // Read once and, where `written`, written once.
  float* state(int64_t count, bool written) {
    float* data = reals(count);
    add("state", data, count, simt::Direction::kBoth, 1, written ? 1 : 0);
    return data;
  }
  void* state(int64_t count, bool written, DType dtype) {
    if (dtype == DType::kFloat32) return state(count, written);
    return zeros("state", count, simt::Direction::kBoth, 1, written ? 1 : 0);
  }
  // Not among what has to be moved.
  Workspace workspace(int64_t bytes, const char* name = "workspace") {
    Workspace space{raw(bytes), bytes};
    if (bytes > 0) own(name, space.data, static_cast<size_t>(bytes));
    return space;
  }

  // Memory of the caller that the kernels read and write.
  void own(const char* name, void* data, size_t bytes) {
    session_.memory.add(name, data, bytes, simt::Direction::kBoth);
  }

  // A call that the backend refuses is an error: every shape here is one that has a kernel.
  void finish(const std::function<Status(Stream)>& call) {
    const Status status = call(&session_);
    if (status != Status::kOk || !session_.report.clean()) {
      std::fprintf(stderr, "%s %s failed with status %d\n%s\n", op_.c_str(), shape_.c_str(),
                   static_cast<int>(status), session_.report.to_string().c_str());
      std::exit(1);
    }
    static bool first = true;
    std::printf(
        "%s\n {\"op\": \"%s\", \"shape\": \"%s\", \"listed\": %s, \"least_bytes\": %lld, \"flops\": %.0f, "
        "\"kernels\": [",
        first ? "" : ",", op_.c_str(), shape_.c_str(), listed_ ? "true" : "false",
        static_cast<long long>(least_), flops_);
    first = false;
    bool first_kernel = true;
    for (const simt::KernelCounts& k : session_.report.kernels) {
      const int64_t requests = k.read.requests + k.write.requests, sectors = k.read.sectors + k.write.sectors;
      std::printf(
          "%s\n  {\"kernel\": \"%s\", \"bytes_read\": %lld, \"bytes_written\": %lld, \"shared_bytes\": %lld, "
          "\"sectors_per_request\": %.3f, \"bank_conflicts\": %lld, \"mma_tf32\": %lld, \"mma_bf16\": %lld}",
          first_kernel ? "" : ",", k.kernel.c_str(), static_cast<long long>(k.read.bytes),
          static_cast<long long>(k.write.bytes), static_cast<long long>(k.shared_bytes),
          requests > 0 ? static_cast<double>(sectors) / static_cast<double>(requests) : 0.0,
          static_cast<long long>(std::max<int64_t>(k.shared.worst, 1) - 1),
          static_cast<long long>(k.mma_tf32), static_cast<long long>(k.mma_bf16));
      first_kernel = false;
    }
    std::printf("]}");
  }

 private:
  uint16_t* zeros(const char* name, int64_t count, simt::Direction direction, int reads, int writes) {
    uint16_t* data = reinterpret_cast<uint16_t*>(raw(count * 2));
    add(name, data, count, direction, reads, writes);
    return data;
  }
  char* raw(int64_t bytes) {
    storage_.emplace_back(new double[static_cast<size_t>(bytes / 8 + 2)]());
    return reinterpret_cast<char*>(storage_.back().get());
  }
  float* reals(int64_t count) {
    float* data = reinterpret_cast<float*>(raw(count * 4));
    for (int64_t i = 0; i < count; ++i) data[i] = std::uniform_real_distribution<float>(-1.0f, 1.0f)(random_);
    return data;
  }
  template <typename T>
  void add(const char* name, T* data, int64_t count, simt::Direction direction, int reads, int writes) {
    session_.memory.add(name, data, static_cast<size_t>(count), direction);
    least_ += count * static_cast<int64_t>(sizeof(T)) * (reads + writes);
  }

  std::string op_, shape_;
  double flops_;
  bool listed_;
  int64_t least_ = 0;
  std::mt19937 random_{1};
  std::vector<std::unique_ptr<double[]>> storage_;
  simt::Session session_;
};

// [B, N], B times the same.
std::vector<int32_t> rows(int64_t B, const std::function<int32_t(int64_t)>& value, int64_t N) {
  std::vector<int32_t> out;
  for (int64_t i = 0; i < B * N; ++i) out.push_back(value(i % N));
  return out;
}

std::string describe(int64_t B, int64_t N, const char* more) {
  return "B " + std::to_string(B) + " N " + std::to_string(N) + more;
}

// A layer and how it is run.
struct Layer {
  int64_t B, HK, HV;
  int64_t DK = 128, DV = 128;
  Gate gate = Gate::kHead;
  DType state = DType::kFloat32;
  bool listed = true;

  Recurrence recurrence() const { return {gate, Update::kDelta, HK, HV, DK, DV}; }
  int64_t gates() const { return gate == Gate::kChannel ? DK : 1; }  // of a head
  int64_t states() const { return B * HV * DV * DK; }
  // S k, S q, and the update: a multiply-add each, and the decay.
  double step_flops() const { return 8.0 * static_cast<double>(states()); }
  std::string describe(int64_t N, const std::string& more) const {
    return "B " + std::to_string(B) + " N " + std::to_string(N) + more + " HV " + std::to_string(HV);
  }
};
// Few heads: a block takes the usual tile of value rows, and tokens are read once a tile. Many: the tallest.
constexpr Layer kFew = {1, 1, 2}, kMany = {4, 16, 32};
constexpr int64_t kPending = 4;

float* log_decays(Run& run, const char* name, int64_t count) {
  float* g = run.input(name, count);
  for (int64_t i = 0; i < count; ++i) g[i] = g[i] * 0.1f - 0.1f;
  return g;
}

FactorsView factors(Run& run, const Layer& layer, int64_t nodes) {
  const int64_t tokens = layer.B * nodes, keys = tokens * layer.HK * layer.DK;
  float* k = run.input("factors.k", keys);
  for (int64_t i = 0; i < keys; ++i) k[i] *= 0.1f;
  const float* u = run.input("factors.u", tokens * layer.HV * layer.DV);
  return {k, u, log_decays(run, "factors.g", tokens * layer.HV * layer.gates()), nodes};
}

// The tokens of a call, float32 and contiguous.
template <typename Params>
void add_tokens(Run& run, Params& p, const Layer& layer, int64_t N) {
  const int64_t B = p.B = layer.B, HK = layer.HK, HV = layer.HV, DK = layer.DK, DV = layer.DV;
  const int64_t gates = layer.gates();
  p.rec = layer.recurrence();
  p.q = run.input("q", B * N * HK * DK), p.k = run.input("k", B * N * HK * DK);
  p.v = run.input("v", B * N * HV * DV);
  p.g = log_decays(run, "g", B * N * HV * gates), p.beta = run.input("beta", B * N * HV);
  p.q_stride = p.k_stride = {N * HK * DK, HK * DK, DK}, p.v_stride = {N * HV * DV, HV * DV, DV};
  p.g_stride = {N * HV * gates, HV * gates, gates}, p.beta_stride = {N * HV, HV, 1};
  p.scale = 0.088f, p.qk_l2norm = true;
}

int32_t* binary_tree(Run& run, int64_t B, int64_t N) {
  return run.indices("parents", rows(B, [](int64_t n) { return static_cast<int32_t>((n + 1) / 2 - 1); }, N));
}

void add_outputs(Run& run, VerifyParams& p, const Layer& layer) {
  const int64_t tokens = p.B * p.N;
  p.out = run.output<float>("out", tokens * layer.HV * layer.DV);
  p.k_out = run.output<float>("k_out", tokens * layer.HK * layer.DK);
  p.u_out = run.output<float>("u_out", tokens * layer.HV * layer.DV);
  p.g_out = run.output<float>("g_out", tokens * layer.HV * layer.gates());
}

// With its arrays; the counters, which outlive the call, are the caller's.
VerifyWorkspace add_workspace(Run& run, VerifyWorkspace space, std::vector<int32_t>& counters) {
  counters.assign(static_cast<size_t>(space.counters_count), 0);
  space.counters = counters.data();
  space.states =
      static_cast<float*>(run.workspace(space.states_count * static_cast<int64_t>(sizeof(float))).data);
  if (!counters.empty()) run.own("counters", counters.data(), counters.size() * sizeof(int32_t));
  return space;
}

void run_verify(Strategy strategy, Precision precision, const char* op, const Layer& layer, int64_t N,
                bool tree, bool pending) {
  const double step = layer.step_flops();
  Run run(
      op, layer.describe(N, std::string(tree ? " tree" : " chain") + (pending ? " pending 4" : "")),
      (strategy == Strategy::kSolve ? 0.0
                                    : step * static_cast<double>(N)) +  // its matrix operations are counted
          (pending ? 3.0 / 8.0 * step * kPending : 0.0),
      layer.listed);
  VerifyParams p;
  add_tokens(run, p, layer, N);
  p.N = N;
  p.state = {run.state(layer.states(), pending, layer.state), layer.state, p.B,
             layer.HV * layer.DV * layer.DK};
  if (tree) p.parents = binary_tree(run, p.B, N);
  if (pending) {
    p.has_pending = true;
    p.pending = factors(run, layer, kPending);
    p.pending_path = {nullptr, nullptr, kPending};
  }
  add_outputs(run, p, layer);
  p.strategy = strategy, p.precision = precision;
  std::vector<int32_t> counters;
  const VerifyWorkspace space = add_workspace(run, verify_workspace(p), counters);
  run.finish([&](Stream stream) { return verify(p, space, stream); });
}

// From the raw projections to the normed heads; with pending tokens as many as the window has rows.
void run_layer(const Layer& layer, int64_t N, bool tree, bool pending) {
  constexpr int64_t W = 4, kMoved = W - 1;
  const int64_t B = layer.B, C = 2 * layer.HK * layer.DK + layer.HV * layer.DV, HV = layer.HV;
  const double step = layer.step_flops(), tokens = static_cast<double>(N);
  Run run(
      "verify layer",
      layer.describe(N, std::string(tree ? " tree" : " chain") + (pending ? " pending 3" : "")),
      (step + 2.0 * W * static_cast<double>(B * C)) * tokens + (pending ? 3.0 / 8.0 * step * kMoved : 0.0),
      layer.listed);
  VerifyLayerParams p;
  VerifyParams& v = p.verify;
  v.rec = layer.recurrence();
  v.B = B, v.N = N;
  v.scale = 0.088f, v.qk_l2norm = true;
  v.state = {run.state(layer.states(), pending, layer.state), layer.state, B, HV * layer.DV * layer.DK};
  if (tree) v.parents = binary_tree(run, B, N);
  p.has_prologue = true;
  LayerPrologue& from = p.prologue;
  const auto projections = [&](const char* name, int64_t nodes) {
    return ConvInputView{run.input(name, B * nodes * C), DType::kFloat32, nodes, nodes * C, C};
  };
  from.mixed = projections("mixed", N);
  from.W = W;
  from.weight = run.input("conv_weight", C * W);
  from.bias = run.input("conv_bias", C);
  from.a = run.input("a", B * N * HV), from.b = run.input("b", B * N * HV);
  from.a_stride = from.b_stride = {N * HV, HV, 1};
  from.A_log = run.input("A_log", HV), from.dt_bias = run.input("dt_bias", HV);
  if (pending) {
    // They replace the window: it is written and not read.
    v.has_pending = true;
    v.pending = factors(run, layer, kMoved);
    v.pending_path = {nullptr, nullptr, kMoved};
    from.pending = projections("pending_mixed", kMoved);
    from.window.data = run.output<float>("conv_state", B * kMoved * C);
  } else {
    from.window.data = run.input("conv_state", B * kMoved * C);
  }
  from.window.slots = B, from.window.slot_stride = kMoved * C;
  p.has_epilogue = true;
  p.epilogue.weight = run.input("norm_weight", layer.DV);
  p.epilogue.eps = 1e-6f;
  p.epilogue.gate = run.input("norm_gate", B * N * HV * layer.DV);
  p.epilogue.gate_stride = {N * HV * layer.DV, HV * layer.DV, layer.DV};
  add_outputs(run, v, layer);
  std::vector<int32_t> counters;
  const VerifyWorkspace space = add_workspace(run, verify_layer_workspace(p), counters);
  run.finish([&](Stream stream) { return verify_layer(p, space, stream); });
}

void run_prefill(Precision precision, const char* op, const Layer& layer, int64_t T) {
  Run run(op, layer.describe(T, ""), 0.0, layer.listed);  // its matrix operations are counted
  PrefillParams p;
  add_tokens(run, p, layer, T);
  p.T = T;
  p.state = {run.state(layer.states(), true, layer.state), layer.state, p.B, layer.HV * layer.DV * layer.DK};
  p.out = run.output<float>("out", p.B * T * layer.HV * layer.DV);
  p.precision = precision;
  run.finish([&](Stream stream) { return prefill(p, stream); });
}

void run_commit(CommitMode mode, const char* op, const Layer& layer) {
  Run run(op, layer.describe(kPending, ""), 3.0 / 8.0 * layer.step_flops() * kPending, layer.listed);
  CommitParams p;
  p.rec = layer.recurrence();
  p.B = layer.B, p.mode = mode;
  p.factors = factors(run, layer, kPending);
  p.path = {nullptr, nullptr, kPending};
  p.state = {run.state(layer.states(), true, layer.state), layer.state, p.B, layer.HV * layer.DV * layer.DK};
  run.finish([&](Stream stream) { return commit(p, stream); });
}

constexpr std::pair<Precision, const char*> kPrecisions[] = {
    {Precision::kTf32x3, " tf32x3"}, {Precision::kTf32, " tf32"}, {Precision::kBf16, " bf16"}};

// The tall tile, which wants many heads.
void run_tall(Layer layer) {
  layer.HV = kEnoughBlocks, layer.DV = kTall;
  run_verify(Strategy::kSerial, Precision::kIeee, "verify serial", layer, 1, false, true);
  run_commit(CommitMode::kFast, "commit fast", layer);
  if (layer.gate == Gate::kHead) run_layer(layer, 1, false, true);
}

// Every instance of the kernels on state tiles, on a head with one tile of value rows.
void run_instances() {
  for (const DType state : {DType::kFloat32, DType::kBFloat16}) {
    for (const Gate gate : {Gate::kHead, Gate::kChannel}) {
      for (const int64_t DK : {32, 64, 96, 128, 192, 256}) {
        const Layer layer = {1, 1, 1, DK, 32, gate, state, false};
        // With DK 256 the states that a tree of 64 keeps leave room for the narrow tile alone.
        for (const int64_t N : {6, 64}) {
          if (N == 6 || DK == 256)
            run_verify(Strategy::kSerial, Precision::kIeee, "verify serial", layer, N, true, true);
        }
        run_verify(Strategy::kHybrid, Precision::kIeee, "verify hybrid", layer, 6, true, true);
        run_commit(CommitMode::kExact, "commit exact", layer);
        run_commit(CommitMode::kFast, "commit fast", layer);
        if (gate == Gate::kHead && has_layer_keys(DK)) run_layer(layer, 6, true, true);
        if (has_tall(gate == Gate::kChannel, static_cast<int>(DK))) run_tall(layer);
        if (state != DType::kFloat32 || (DK != 128 && DK != 256)) continue;
        for (const auto& [precision, name] : kPrecisions) {
          for (const int64_t N : {8, 24})
            run_verify(Strategy::kSolve, precision, "verify solve", layer, N, true, true);
          run_prefill(precision, "prefill", layer, 40);
        }
      }
    }
  }
}

// Types and sizes of a convolution.
struct Conv {
  DType x = DType::kFloat32, window = DType::kFloat32;
  int64_t W = 4, C = 512;
  bool listed = true;
};

void run_conv(const Conv& conv, int64_t N, bool pending) {
  constexpr int64_t B = 1;
  const int64_t C = conv.C, W = conv.W, moved = W - 1;
  Run run("conv_verify", describe(B, N, pending ? " tree pending 3" : " tree"),
          2.0 * static_cast<double>(W * C * N * B), conv.listed);
  ConvVerifyParams p;
  p.B = B, p.N = N, p.C = C, p.W = W;
  p.x = {run.input("x", B * N * C, conv.x), conv.x, N, N * C, C};
  p.weight = run.input("weight", C * W);
  p.parents = binary_tree(run, B, N);
  if (pending) {
    // A path of W - 1 replaces the window: it is written and not read.
    p.state = {run.output("state", B * moved * C, conv.window), conv.window, B, moved * C};
    p.has_pending = true;
    p.pending = {run.input("pending", B * moved * C, conv.x), conv.x, moved, moved * C, C};
    p.pending_path = {nullptr, nullptr, moved};
  } else {
    p.state = {run.state(B * moved * C, false, conv.window), conv.window, B, moved * C};
  }
  p.y = run.output("y", B * N * C, conv.x);
  run.finish([&](Stream stream) { return conv_verify(p, stream); });
}

void run_conv_commit(const Conv& conv) {
  constexpr int64_t B = 4;
  const int64_t C = conv.C, P = conv.W - 1;
  Run run("conv_commit", describe(B, P, ""), 0.0, conv.listed);
  ConvCommitParams p;
  p.B = B, p.C = C, p.W = conv.W;
  p.x = {run.input("x", B * P * C, conv.x), conv.x, P, P * C, C};
  p.path = {nullptr, nullptr, P};
  p.state = {run.output("state", B * P * C, conv.window), conv.window, B, P * C};
  run.finish([&](Stream stream) { return conv_commit(p, stream); });
}

// Every instance of the convolution: types, taps, and rows that are no whole vectors.
void run_conv_instances() {
  for (const DType x : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const bool own : {false, true}) {
      for (const int64_t W : {3, 4}) {
        for (const int64_t C : {64, 65}) {
          const Conv conv = {x, own ? x : DType::kFloat32, W, C, false};
          run_conv(conv, 6, true);
          run_conv_commit(conv);
        }
      }
    }
  }
}

// Candidates that are all wrong, so that the round ends at its root.
template <typename Params>
void add_round(Run& run, Params& p, int64_t B, int64_t N, int64_t V) {
  p.B = B, p.N = N, p.V = V;
  p.draft.tokens = run.indices("tokens", std::vector<int64_t>(static_cast<size_t>(B * N)));
  p.accepted = {run.output<int32_t>("path", B * N), run.output<int32_t>("path_lengths", B),
                run.output<int64_t>("next_token", B), N};
}

void run_accept_greedy(DType dtype, int64_t V, bool listed) {
  constexpr int64_t B = 2, N = 4;
  Run run("accept_greedy", describe(B, N, " V ") + std::to_string(V), static_cast<double>(B * N * V), listed);
  AcceptGreedyParams p;
  add_round(run, p, B, N, V);
  p.dtype = dtype;
  p.logits = run.input("logits", B * N * V, dtype), p.stride_b = N * V, p.stride_n = V;
  const Workspace space = run.workspace(accept_greedy_workspace_bytes(p));
  run.finish([&](Stream stream) { return accept_greedy(p, space, stream); });
}

// Of blocks that work on a row together.
TeamWorkspace team_workspace(Run& run, TeamWorkspace space) {
  space.values = static_cast<uint64_t*>(run.workspace(space.values_count * 8, "values").data);
  space.counters = static_cast<int32_t*>(run.workspace(space.counters_count * 4, "counters").data);
  return space;
}

SamplingView add_sampling(Run& run, int64_t rows, int32_t top_k, float top_p) {
  const auto filled = [&](const char* name, float x) {
    float* data = run.input(name, rows);
    std::fill(data, data + rows, x);
    return data;
  };
  return {filled("temperature", 1.0f), run.indices("top_k", std::vector<int32_t>(rows, top_k)),
          filled("top_p", top_p), filled("min_p", 0.0f)};
}

// Recursive rejection of a chain's only draft: p, and max(p - q, 0) for the token that follows.
void run_accept_sampled(DType dtype, int64_t V, bool listed) {
  constexpr int64_t B = 2, N = 2;
  Run run("accept_sampled", describe(B, N, " V ") + std::to_string(V), 60.0 * static_cast<double>(B * V),
          listed);
  AcceptSampledParams p;
  add_round(run, p, B, N, V);
  p.dtype = dtype;
  p.logits = run.input("logits", B * V, dtype), p.stride_b = V, p.stride_n = 0;
  float* q = run.input("draft_probs", V);
  for (int64_t i = 0; i < V; ++i) q[i] = (q[i] + 1.0f) / static_cast<float>(V);
  q[0] = 1.0f;  // of the token that was drafted, which is rejected but with a probability of 1 / V
  p.draft_probs = q, p.R = 1, p.draft_stride = V;
  p.draft_rows = run.indices("draft_rows", std::vector<int32_t>(B * N));
  p.rules = run.indices("rules", std::vector<int32_t>(B, static_cast<int32_t>(AcceptRule::kRecursive)));
  p.sampling = add_sampling(run, B, 0, 1.0f);
  p.seeds = run.indices("seeds", std::vector<uint64_t>(B, 1));
  p.positions = run.indices("positions", std::vector<int64_t>(B, 7));
  const TeamWorkspace space = team_workspace(run, accept_sampled_workspace(p));
  run.finish([&](Stream stream) { return accept_sampled(p, space, stream); });
}

void run_sampling_probs(DType dtype, int64_t V, bool listed, int32_t top_k, float top_p) {
  constexpr int64_t R = 2;
  Run run("sampling_probs", "R 2 V " + std::to_string(V) + (top_p < 1.0f ? " nucleus" : ""),
          40.0 * static_cast<double>(R * V), listed);
  SamplingProbsParams p;
  p.R = R, p.V = V, p.dtype = dtype, p.stride = V;
  p.logits = run.input("logits", R * V, dtype);
  p.sampling = add_sampling(run, R, top_k, top_p);
  p.probs = run.output<float>("probs", R * V);
  const TeamWorkspace space = team_workspace(run, sampling_probs_workspace(p));
  run.finish([&](Stream stream) { return sampling_probs(p, space, stream); });
}

void run_draw_tokens(int64_t V, bool replacement, bool listed) {
  constexpr int64_t R = 2, K = 2;
  Run run("draw_tokens", "R 2 K 2 V " + std::to_string(V) + (replacement ? "" : " without replacement"),
          static_cast<double>(R * V) * (replacement ? 4.0 : 200.0), listed);
  DrawParams p;
  p.R = R, p.V = V, p.K = K, p.replacement = replacement, p.stride = V;
  p.probs = run.input("probs", R * V);
  p.seeds = run.indices("seeds", std::vector<uint64_t>(R, 1));
  p.positions = run.indices("positions", std::vector<int64_t>(R, 7));
  p.nodes = run.indices("nodes", std::vector<int32_t>(R));
  p.tokens = run.output<int64_t>("tokens", R * K);
  const TeamWorkspace space = team_workspace(run, draw_tokens_workspace(p));
  run.finish([&](Stream stream) { return draw_tokens(p, space, stream); });
}

// A binary tree below B sequences of `committed` tokens each.
void run_attention(DType dtype, int64_t D, int64_t N, int64_t committed, bool listed) {
  constexpr int64_t B = 2, HQ = 8, HK = 2;
  const double products = static_cast<double>(B * N * HQ * committed * D);
  Run run("tree_attention",
          describe(B, N, " HQ 8 HK 2 D ") + std::to_string(D) + " cache " + std::to_string(committed),
          4.0 * products, listed);
  const auto dense = [](int64_t tokens, int64_t heads, int64_t width) {
    return Strides{tokens * heads * width, heads * width, width};
  };
  TreeAttentionParams p;
  p.B = B, p.N = N, p.HQ = HQ, p.HK = HK, p.D = D, p.dtype = dtype;
  p.q = run.input("q", B * N * HQ * D, dtype), p.q_stride = dense(N, HQ, D);
  p.nodes.k = run.input("k", B * N * HK * D, dtype), p.nodes.k_stride = dense(N, HK, D);
  p.nodes.v = run.input("v", B * N * HK * D, dtype), p.nodes.v_stride = dense(N, HK, D);
  p.nodes.nodes = N;
  const Strides of_cache{HK * committed * D, D, committed * D};
  p.cache = {run.input("k_cache", B * HK * committed * D, dtype),
             run.input("v_cache", B * HK * committed * D, dtype),
             of_cache,
             of_cache,
             run.indices("cache_lengths", std::vector<int32_t>(B, static_cast<int32_t>(committed))),
             B,
             committed};
  p.parents = run.indices(
      "parents", rows(B, [](int64_t n) { return static_cast<int32_t>(n > 0 ? (n - 1) / 2 : -1); }, N));
  p.out = run.output("out", B * N * HQ * D, dtype);
  const Workspace space = run.workspace(tree_attention_workspace_bytes(p));
  run.finish([&](Stream stream) { return tree_attention(p, space, stream); });
}

}  // namespace
}  // namespace specdec::cuda

int main() {
  using namespace specdec;
  using namespace specdec::cuda;
  std::printf("[");
  for (const bool pending : {false, true}) {
    run_verify(Strategy::kSerial, Precision::kIeee, "verify serial", kFew, 8, false, pending);
    run_layer(kFew, 8, false, pending);
    for (const int64_t N : {8, 32}) {
      run_layer(kFew, N, true, pending);
      run_verify(Strategy::kSerial, Precision::kIeee, "verify serial", kFew, N, true, pending);
      run_verify(Strategy::kHybrid, Precision::kIeee, "verify hybrid", kFew, N, true, pending);
      for (const auto& [precision, name] : kPrecisions) {
        const std::string op = std::string("verify solve") + name;
        run_verify(Strategy::kSolve, precision, op.c_str(), kFew, N, true, pending);
      }
    }
  }
  run_verify(Strategy::kSerial, Precision::kIeee, "verify serial", kMany, 8, false, true);
  run_verify(Strategy::kSolve, Precision::kTf32x3, "verify solve tf32x3", kMany, 8, false, true);
  run_layer(kMany, 8, false, true);
  for (const auto& [precision, name] : kPrecisions) {
    run_prefill(precision, (std::string("prefill") + name).c_str(), kFew, 128);
  }
  run_commit(CommitMode::kExact, "commit exact", kFew);
  run_commit(CommitMode::kFast, "commit fast", kFew);
  run_instances();
  for (const int64_t N : {8, 32}) {
    for (const bool pending : {false, true}) run_conv(Conv(), N, pending);
  }
  run_conv_commit(Conv());
  run_conv_instances();
  for (const int64_t D : {64, 128}) {
    for (const int64_t N : {1, 8}) run_attention(DType::kBFloat16, D, N, 2048, true);
  }
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t D : {48, 64, 128}) run_attention(dtype, D, 3, 600, false);
  }
  run_accept_greedy(DType::kFloat32, 32768, true);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t V : {64, 65}) run_accept_greedy(dtype, V, false);
  }
  run_accept_sampled(DType::kBFloat16, 32768, true);
  run_sampling_probs(DType::kBFloat16, 32768, true, 0, 1.0f);
  run_sampling_probs(DType::kBFloat16, 32768, true, 50, 0.95f);
  for (const bool replacement : {true, false}) run_draw_tokens(32768, replacement, true);
  for (const int64_t V : {64, 65}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      run_accept_sampled(dtype, V, false);
      run_sampling_probs(dtype, V, false, 0, 1.0f);
    }
    run_draw_tokens(V, true, false);
  }
  std::printf("\n]\n");
  return 0;
}
