// Runs standard shapes of every op of the CUDA backend through the executor and prints, as JSON, what each
// kernel moved: bytes counted and least possible, sectors a request, bank conflicts, arithmetic.
// tools/kernel_report.py reads it. The shapes are those of a Gated DeltaNet layer with heads of 128, few
// enough heads to run in seconds: counts scale with sequences and heads.
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ops.h"
#include "session.h"

namespace specdec::cuda {
namespace {

constexpr int64_t kHeadDim = 128;

// One op on one shape: its buffers, and of each the bytes that have to be read and written at least.
class Run {
 public:
  Run(std::string op, std::string shape, double flops)
      : op_(std::move(op)), shape_(std::move(shape)), flops_(flops) {}

  // A buffer of random numbers in [-1, 1] that is read once.
  float* input(const char* name, int64_t count) {
    float* data = reals(count);
    add(name, data, count, simt::Direction::kInput, 1, 0);
    return data;
  }
  int32_t* indices(const char* name, const std::vector<int32_t>& values) {
    int32_t* data = reinterpret_cast<int32_t*>(raw(static_cast<int64_t>(values.size()) * 4));
    std::copy(values.begin(), values.end(), data);
    add(name, data, static_cast<int64_t>(values.size()), simt::Direction::kInput, 1, 0);
    return data;
  }
  double* uniforms(const char* name, int64_t count) {
    double* data = reinterpret_cast<double*>(raw(count * 8));
    for (int64_t i = 0; i < count; ++i) data[i] = 0.5;
    add(name, data, count, simt::Direction::kInput, 1, 0);
    return data;
  }
  template <typename T>
  T* output(const char* name, int64_t count) {
    T* data = reinterpret_cast<T*>(raw(count * static_cast<int64_t>(sizeof(T))));
    add(name, data, count, simt::Direction::kOutput, 0, 1);
    return data;
  }
  // Read once and, where `written`, written once.
  float* state(int64_t count, bool written) {
    float* data = reals(count);
    add("state", data, count, simt::Direction::kBoth, 1, written ? 1 : 0);
    return data;
  }
  // Not among what has to be moved.
  Workspace workspace(int64_t bytes) {
    Workspace space{raw(bytes), bytes};
    if (bytes > 0) own("workspace", space.data, static_cast<size_t>(bytes));
    return space;
  }

  // Memory of the caller that the kernels read and write.
  void own(const char* name, void* data, size_t bytes) {
    session_.memory.add(name, data, bytes, simt::Direction::kBoth);
  }

  // Nothing where the backend has no kernel for the call.
  void finish(const std::function<Status(Stream)>& call) {
    const Status status = call(&session_);
    if (status == Status::kUnsupported) return;
    if (status != Status::kOk || !session_.report.clean()) {
      std::fprintf(stderr, "%s %s failed\n%s\n", op_.c_str(), shape_.c_str(),
                   session_.report.to_string().c_str());
      std::exit(1);
    }
    static bool first = true;
    std::printf(
        "%s\n {\"op\": \"%s\", \"shape\": \"%s\", \"least_bytes\": %lld, \"flops\": %.0f, \"kernels\": [",
        first ? "" : ",", op_.c_str(), shape_.c_str(), static_cast<long long>(least_), flops_);
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
          static_cast<long long>(k.shared.worst), static_cast<long long>(k.mma_tf32),
          static_cast<long long>(k.mma_bf16));
      first_kernel = false;
    }
    std::printf("]}");
  }

 private:
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
  int64_t least_ = 0;
  std::mt19937 random_{1};
  std::vector<std::unique_ptr<double[]>> storage_;
  simt::Session session_;
};

std::vector<int32_t> rows(int64_t B, const std::function<int32_t(int64_t)>& value, int64_t N = 1) {
  std::vector<int32_t> out;
  for (int64_t i = 0; i < B * N; ++i) out.push_back(value(i % N));
  return out;
}

std::string describe(int64_t B, int64_t N, const char* more) {
  return "B " + std::to_string(B) + " N " + std::to_string(N) + more;
}

FactorsView factors(Run& run, int64_t B, int64_t nodes, int64_t HK, int64_t HV) {
  float* k = run.input("factors.k", B * nodes * HK * kHeadDim);
  for (int64_t i = 0; i < B * nodes * HK * kHeadDim; ++i) k[i] *= 0.1f;
  const float* u = run.input("factors.u", B * nodes * HV * kHeadDim);
  float* g = run.input("factors.g", B * nodes * HV);
  for (int64_t i = 0; i < B * nodes * HV; ++i) g[i] = g[i] * 0.1f - 0.1f;
  return {k, u, g, nodes};
}

// Few heads: a block takes the smallest tile of value rows, and tokens are read once a tile. Many: the
// tallest.
struct Heads {
  int64_t B, HK, HV;
};
constexpr Heads kFew = {1, 1, 2}, kMany = {4, 16, 32};

void run_verify(Strategy strategy, const char* op, const Heads& heads, int64_t N, bool tree, bool pending) {
  constexpr int64_t D = kHeadDim, kPending = 4;
  const int64_t B = heads.B, HK = heads.HK, HV = heads.HV;
  const double step =
      8.0 * D * D *
      static_cast<double>(HV * B);  // S k, S q, and the update: a multiply-add each, and the decay
  Run run(
      op,
      describe(B, N, tree ? " tree" : " chain") + (pending ? " pending 4" : "") + " HV " + std::to_string(HV),
      step * static_cast<double>(N) + (pending ? 3.0 / 8.0 * step * kPending : 0.0));
  VerifyParams p;
  p.rec = {Gate::kHead, Update::kDelta, HK, HV, D, D};
  p.B = B, p.N = N;
  p.q = run.input("q", B * N * HK * D), p.k = run.input("k", B * N * HK * D),
  p.v = run.input("v", B * N * HV * D);
  float* g = run.input("g", B * N * HV);
  for (int64_t i = 0; i < B * N * HV; ++i) g[i] = g[i] * 0.1f - 0.1f;
  p.g = g, p.beta = run.input("beta", B * N * HV);
  p.q_stride = p.k_stride = {N * HK * D, HK * D, D}, p.v_stride = {N * HV * D, HV * D, D};
  p.g_stride = p.beta_stride = {N * HV, HV, 1};
  p.scale = 0.088f, p.qk_l2norm = true;
  p.state = {run.state(B * HV * D * D, pending), DType::kFloat32, B, HV * D * D};
  if (tree)
    p.parents =
        run.indices("parents", rows(B, [](int64_t n) { return static_cast<int32_t>((n + 1) / 2 - 1); }, N));
  if (pending) {
    p.has_pending = true;
    p.pending = factors(run, B, kPending, HK, HV);
    p.pending_path = {nullptr, nullptr, kPending};
  }
  p.out = run.output<float>("out", B * N * HV * D), p.k_out = run.output<float>("k_out", B * N * HK * D);
  p.u_out = run.output<float>("u_out", B * N * HV * D), p.g_out = run.output<float>("g_out", B * N * HV);
  p.strategy = strategy;
  VerifyWorkspace space = verify_workspace(p);
  std::vector<int32_t> counters(space.counters_count, 0);
  space.counters = counters.data();
  space.states =
      static_cast<float*>(run.workspace(space.states_count * static_cast<int64_t>(sizeof(float))).data);
  if (!counters.empty()) run.own("counters", counters.data(), counters.size() * sizeof(int32_t));
  run.finish([&](Stream stream) { return verify(p, space, stream); });
}

void run_commit(CommitMode mode, const char* op) {
  constexpr int64_t B = 1, P = 4, HK = 1, HV = 2, D = kHeadDim;
  Run run(op, describe(B, P, ""), 3.0 * D * D * HV * B * P);
  CommitParams p;
  p.rec = {Gate::kHead, Update::kDelta, HK, HV, D, D};
  p.B = B, p.mode = mode;
  p.factors = factors(run, B, P, HK, HV);
  p.path = {nullptr, nullptr, P};
  p.state = {run.state(B * HV * D * D, true), DType::kFloat32, B, HV * D * D};
  run.finish([&](Stream stream) { return commit(p, stream); });
}

void run_conv(int64_t N, bool pending) {
  constexpr int64_t B = 1, C = 512, W = 4, kPending = 3;
  Run run("conv_verify", describe(B, N, pending ? " tree pending 3" : " tree"),
          2.0 * W * C * static_cast<double>(N) * B);
  ConvVerifyParams p;
  p.B = B, p.N = N, p.C = C, p.W = W;
  p.x = {run.input("x", B * N * C), DType::kFloat32, N, N * C, C};
  p.weight = run.input("weight", C * W);
  p.parents =
      run.indices("parents", rows(B, [](int64_t n) { return static_cast<int32_t>((n + 1) / 2 - 1); }, N));
  if (pending) {
    // A path of W - 1 replaces the window: it is written and not read.
    p.state = {run.output<float>("state", B * (W - 1) * C), DType::kFloat32, B, (W - 1) * C};
    p.has_pending = true;
    p.pending = {run.input("pending", B * kPending * C), DType::kFloat32, kPending, kPending * C, C};
    p.pending_path = {nullptr, nullptr, kPending};
  } else {
    p.state = {run.state(B * (W - 1) * C, false), DType::kFloat32, B, (W - 1) * C};
  }
  p.y = run.output<float>("y", B * N * C);
  run.finish([&](Stream stream) { return conv_verify(p, stream); });
}

void run_conv_commit() {
  constexpr int64_t B = 4, C = 512, W = 4, P = 3;
  Run run("conv_commit", describe(B, P, ""), 0.0);
  ConvCommitParams p;
  p.B = B, p.C = C, p.W = W;
  p.x = {run.input("x", B * P * C), DType::kFloat32, P, P * C, C};
  p.path = {nullptr, nullptr, P};
  p.state = {run.output<float>("state", B * (W - 1) * C), DType::kFloat32, B, (W - 1) * C};
  run.finish([&](Stream stream) { return conv_commit(p, stream); });
}

// Candidates that are all wrong, so that the round ends at its root.
template <typename Params>
void add_round(Run& run, Params& p, int64_t B, int64_t N, int64_t V) {
  p.B = B, p.N = N, p.V = V;
  const std::vector<int32_t> tokens = rows(B * N * 2, [](int64_t) { return 0; });
  p.draft.tokens = reinterpret_cast<const int64_t*>(run.indices("tokens", tokens));
  p.accepted = {run.output<int32_t>("path", B * N), run.output<int32_t>("path_lengths", B),
                run.output<int64_t>("next_token", B), N};
}

void run_accept_greedy() {
  constexpr int64_t B = 2, N = 4, V = 32768;
  Run run("accept_greedy", describe(B, N, " V 32768"), 1.0 * B * N * V);
  AcceptGreedyParams p;
  add_round(run, p, B, N, V);
  p.logits = run.input("logits", B * N * V), p.stride_b = N * V, p.stride_n = V;
  const Workspace space = run.workspace(accept_greedy_workspace_bytes(p));
  run.finish([&](Stream stream) { return accept_greedy(p, space, stream); });
}

void run_accept_sampled(bool drafted) {
  constexpr int64_t B = 2, N = 2, V = 65536;
  Run run("accept_sampled", describe(B, N, drafted ? " V 65536 drawn" : " V 65536 one-hot"), 2.0 * B * V);
  AcceptSampledParams p;
  add_round(run, p, B, N, V);
  // The rows that decide, and no others: with drawn drafts the first of each sequence.
  const auto positive = [](float* x, int64_t count, float floor) {
    for (int64_t i = 0; i < count; ++i) x[i] = floor + (x[i] + 1.0f) / 2.0f;
    return x;
  };
  const int64_t target_rows = drafted ? 1 : N;
  p.p_target = positive(run.input("p_target", B * target_rows * V), B * target_rows * V, 0.0f);
  p.target_stride_b = target_rows * V, p.target_stride_n = V;
  if (drafted) {
    float* q = positive(run.input("p_draft", B * V), B * V, 0.5f);
    for (int64_t b = 0; b < B; ++b) q[b * V] = 1e9f;  // rejected
    p.p_draft = q, p.draft_stride_b = V, p.draft_stride_n = V;
    p.accept_uniforms = run.uniforms("accept", B * N);
  }
  p.sample_uniforms = run.uniforms("sample", B * N);
  const Workspace space = run.workspace(accept_sampled_workspace_bytes(p));
  run.finish([&](Stream stream) { return accept_sampled(p, space, stream); });
}

}  // namespace
}  // namespace specdec::cuda

int main() {
  using namespace specdec;
  using namespace specdec::cuda;
  std::printf("[");
  for (const auto& [strategy, op] : {std::pair{Strategy::kSerial, "verify serial"},
                                     {Strategy::kHybrid, "verify hybrid"},
                                     {Strategy::kSolve, "verify solve"}}) {
    for (const int64_t N : {8, 32}) {
      for (const bool pending : {false, true}) run_verify(strategy, op, kFew, N, N == 32, pending);
    }
    run_verify(strategy, op, kMany, 8, false, true);
  }
  run_commit(CommitMode::kExact, "commit exact");
  run_commit(CommitMode::kFast, "commit fast");
  for (const int64_t N : {8, 32}) {
    for (const bool pending : {false, true}) run_conv(N, pending);
  }
  run_conv_commit();
  run_accept_greedy();
  run_accept_sampled(true);
  run_accept_sampled(false);
  std::printf("\n]\n");
  return 0;
}
