#include "layers.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <map>
#include <utility>

#include "../../../csrc/cpu/ops.h"
#include "../../../tests/cpp/buffer.h"

namespace specdec::bench {
namespace {

using gpu::check;
using gpu::DeviceMemory;

// Row `row` of an array of `rows` equal ones, on the host.
std::vector<char> row_of(const void* device, int64_t bytes, int64_t row) {
  std::vector<char> host(static_cast<size_t>(bytes));
  if (bytes > 0) {
    check(cudaMemcpy(host.data(), static_cast<const char*>(device) + row * bytes, host.size(),
                     cudaMemcpyDeviceToHost),
          "cudaMemcpy");
  }
  return host;
}

template <typename T>
const T* as(const std::vector<char>& bytes) {
  return reinterpret_cast<const T*>(bytes.data());
}

// Relative error in the 2-norm; NaN where there is one.
double error_of(const std::vector<char>& got, const std::vector<char>& want, DType dtype) {
  const int64_t count = static_cast<int64_t>(want.size()) / (dtype == DType::kFloat32 ? 4 : 2);
  double off = 0.0, size = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    const double x = test::widen(got.data(), dtype, i), y = test::widen(want.data(), dtype, i);
    off += (x - y) * (x - y);
    size += y * y;
  }
  return std::sqrt(off / size);
}

// What two backends may differ by: 2^-24 for each of the DK (tokens + 1) roundings that a number has seen,
// with independent signs, times 8 for the rare ones (tests/cpp/recurrence_problem.h), twice for two float32
// backends and twice again for split TF32. Coarser products add their own unit a token, coarser types half a
// unit of theirs.
double tolerance(int64_t DK, int64_t tokens, Strategy strategy, Precision precision, DType dtype) {
  double t = 8.0 * 2.0 * 0x1p-24 * std::sqrt(static_cast<double>(DK * (tokens + 1)));
  if (strategy == Strategy::kSolve) {
    t *= 2.0;
    if (precision == Precision::kTf32) t += 8.0 * 0x1p-11 * static_cast<double>(tokens + 1);
    if (precision == Precision::kBf16) t += 8.0 * 0x1p-8 * static_cast<double>(tokens + 1);
  }
  return t + (dtype == DType::kFloat32 ? 0.0 : 0x1p-8);
}

// NaN in every byte of arrays on the device, before anything else runs.
void poison(std::initializer_list<std::pair<void*, int64_t>> arrays) {
  for (const auto& [data, bytes] : arrays) {
    check(cudaMemset(data, 0xff, static_cast<size_t>(bytes)), "cudaMemset");
  }
  check(cudaDeviceSynchronize(), "cudaMemset");
}

std::string compare(const char* what, const std::vector<char>& got, const std::vector<char>& want,
                    DType dtype, double tolerated) {
  const double error = error_of(got, want, dtype);
  if (error <= tolerated) return "";
  return std::string(what) + " is wrong: relative error " + std::to_string(error) +
         " against the CPU backend, " + std::to_string(tolerated) + " is tolerated";
}

// p's tokens and slots of the last of B sequences, on the host: what the CPU backend computes.
struct LastRow {
  template <typename Params>
  explicit LastRow(const Params& p) : row(p.B - 1) {
    const Recurrence& r = p.rec;
    const int64_t keys = 2 * p.q_stride.b, values = 2 * p.v_stride.b, gates = 4 * p.g_stride.b;
    q = row_of(p.q, keys, row), k = row_of(p.k, keys, row), v = row_of(p.v, values, row);
    g = row_of(p.g, gates, row), beta = row_of(p.beta, gates, row);
    state = row_of(p.state.data, state_bytes(p.state, r), row);
  }
  template <typename Params>
  void fill(Params& p) {
    p.B = 1;
    p.q = q.data(), p.k = k.data(), p.v = v.data(), p.g = as<float>(g), p.beta = as<float>(beta);
    p.state.data = state.data(), p.state.slots = 1;
  }
  static int64_t state_bytes(const StateView& s, const Recurrence& r) {
    return r.HV * r.DV * r.DK * (s.dtype == DType::kFloat32 ? 4 : 2);
  }

  int64_t row;
  std::vector<char> q, k, v, g, beta, state;
};

// Factors of one row.
struct FactorsRow {
  FactorsRow(const FactorsView& f, const Recurrence& r, int64_t row)
      : k(row_of(f.k, f.nodes * r.HK * r.DK * 4, row)),
        u(row_of(f.u, f.nodes * r.HV * r.DV * 4, row)),
        g(row_of(f.g, f.nodes * r.HV * 4, row)),
        nodes(f.nodes) {}
  FactorsView view() const { return {as<float>(k), as<float>(u), as<float>(g), nodes}; }

  std::vector<char> k, u, g;
  int64_t nodes;
};

}  // namespace

Layers::Layers(const Heads& heads, int64_t B_, int64_t N_, int64_t bank_)
    : h(heads), B(B_), N(N_), bank(bank_) {
  const double set =
      static_cast<double>(token_bytes() + state_bytes() + 2 * values() + factor_bytes(N + bank));
  sets_ = rotation(set);
  if (sets_ <= 0) return;
  const auto make = [&](DeviceMemory& memory, int64_t bytes, DType dtype, double scale, double shift) {
    static unsigned seed = 0;
    memory = DeviceMemory(static_cast<size_t>(sets_ * bytes));
    fill(memory, dtype, scale, shift, ++seed);
  };
  make(q_, 2 * keys(), DType::kBFloat16, 1.0, 0.0), make(k_, 2 * keys(), DType::kBFloat16, 1.0, 0.0);
  make(v_, 2 * values(), DType::kBFloat16, 1.0, 0.0);
  make(g_, 4 * gates(), DType::kFloat32, 0.05, -0.05), make(beta_, 4 * gates(), DType::kFloat32, 0.5, 0.5);
  make(state_, state_bytes(), h.state, 1.0, 0.0);
  const int64_t nodes = B * bank;
  // Keys of about unit length.
  make(bank_k_, nodes * h.HK * h.D * 4, DType::kFloat32, std::sqrt(3.0 / static_cast<double>(h.D)), 0.0);
  make(bank_u_, nodes * h.HV * h.D * 4, DType::kFloat32, 1.0, 0.0);
  make(bank_g_, nodes * h.HV * 4, DType::kFloat32, 0.05, -0.05);
  out_ = DeviceMemory(sets_ * 2 * values()), k_out_ = DeviceMemory(sets_ * 4 * keys());
  u_out_ = DeviceMemory(sets_ * 4 * values()), g_out_ = DeviceMemory(sets_ * 4 * gates());
  // A binary tree.
  std::vector<int32_t> parents;
  for (int64_t i = 0; i < B * N; ++i) parents.push_back(static_cast<int32_t>((i % N + 1) / 2 - 1));
  parents_ = DeviceMemory(parents.size() * 4);
  check(cudaMemcpy(parents_.data(), parents.data(), parents_.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
  int64_t floats = 0, counters = 0;
  for (const Strategy strategy : {Strategy::kSerial, Strategy::kHybrid, Strategy::kSolve}) {
    if (N > (strategy == Strategy::kSolve ? kMaxSolveNodes : kMaxSerialNodes)) continue;
    for (const bool tree : {false, true}) {
      const cuda::VerifyWorkspace wanted = cuda::verify_workspace(verify(0, strategy, tree, bank));
      floats = std::max(floats, wanted.states_count), counters = std::max(counters, wanted.counters_count);
    }
  }
  space_ = DeviceMemory(static_cast<size_t>(floats * 4)),
  counters_ = DeviceMemory(static_cast<size_t>(counters * 4));
  if (counters > 0) check(cudaMemset(counters_.data(), 0, counters_.bytes()), "cudaMemset");
}

template <typename Params>
void Layers::fill_tokens(Params& p, int64_t set) const {
  p.rec = {Gate::kHead, Update::kDelta, h.HK, h.HV, h.D, h.D};
  p.B = B;
  p.dtype = DType::kBFloat16;
  p.q = at(q_, set, 2 * keys()), p.k = at(k_, set, 2 * keys()), p.v = at(v_, set, 2 * values());
  p.g = at<float>(g_, set, 4 * gates()), p.beta = at<float>(beta_, set, 4 * gates());
  p.q_stride = p.k_stride = {N * h.HK * h.D, h.HK * h.D, h.D};
  p.v_stride = {N * h.HV * h.D, h.HV * h.D, h.D};
  p.g_stride = p.beta_stride = {N * h.HV, h.HV, 1};
  p.scale = 1.0f / std::sqrt(static_cast<float>(h.D));
  p.qk_l2norm = true;
  p.state = {state(set), h.state, B, h.HV * h.D * h.D};
  p.out = at(out_, set, 2 * values());
}

FactorsView Layers::bank_of(int64_t set) const {
  const int64_t nodes = B * bank;
  return {at<float>(bank_k_, set, nodes * h.HK * h.D * 4), at<float>(bank_u_, set, nodes * h.HV * h.D * 4),
          at<float>(bank_g_, set, nodes * h.HV * 4), bank};
}

VerifyParams Layers::verify(int64_t set, Strategy strategy, bool tree, int64_t pending) const {
  VerifyParams p;
  fill_tokens(p, set);
  p.N = N;
  if (tree) p.parents = static_cast<const int32_t*>(parents_.data());
  p.k_out = at<float>(k_out_, set, 4 * keys()), p.u_out = at<float>(u_out_, set, 4 * values());
  p.g_out = at<float>(g_out_, set, 4 * gates());
  p.strategy = strategy;
  p.precision = strategy == Strategy::kSolve ? Precision::kTf32x3 : Precision::kIeee;
  p.has_pending = pending > 0;
  if (pending > 0) {
    p.pending = bank_of(set);
    p.pending_path.max_length = pending;
  }
  return p;
}

CommitParams Layers::commit(int64_t set, int64_t factors, CommitMode mode) const {
  CommitParams p;
  p.rec = {Gate::kHead, Update::kDelta, h.HK, h.HV, h.D, h.D};
  p.B = B;
  p.factors = bank_of(set);
  p.path.max_length = factors;
  p.state = {state(set), h.state, B, h.HV * h.D * h.D};
  p.mode = mode;
  return p;
}

PrefillParams Layers::prefill(int64_t set) const {
  PrefillParams p;
  fill_tokens(p, set);
  p.T = N;
  p.precision = Precision::kTf32x3;
  return p;
}

Status Layers::run(const VerifyParams& p, cudaStream_t stream) const {
  cuda::VerifyWorkspace space = cuda::verify_workspace(p);
  space.states = static_cast<float*>(space_.data());
  space.counters = static_cast<int32_t*>(counters_.data());
  return cuda::verify(p, space, stream);
}

double Layers::verify_bytes(int64_t pending) const {
  const int64_t passes = pending > 0 ? 2 : 1;
  return static_cast<double>(passes * state_bytes() + token_bytes() + 2 * values() +
                             factor_bytes(N + pending));
}

double Layers::commit_bytes(int64_t factors) const {
  return static_cast<double>(2 * state_bytes() + factor_bytes(factors));
}

double Layers::prefill_bytes() const {
  return static_cast<double>(2 * state_bytes() + token_bytes() + 2 * values());
}

std::string Layers::wrong(const VerifyParams& p) const {
  poison({{p.out, 2 * values()}, {p.k_out, 4 * keys()}, {p.u_out, 4 * values()}, {p.g_out, 4 * gates()}});
  LastRow host(p);
  VerifyParams c = p;
  host.fill(c);
  std::vector<char> out(static_cast<size_t>(2 * values() / B)), u(2 * out.size()), k(4 * keys() / B),
      g(4 * gates() / B);
  c.out = out.data(), c.u_out = reinterpret_cast<float*>(u.data());
  c.k_out = reinterpret_cast<float*>(k.data()), c.g_out = reinterpret_cast<float*>(g.data());
  c.strategy = N <= kMaxSerialNodes ? Strategy::kSerial : Strategy::kSolve;
  c.precision = Precision::kIeee;
  const std::vector<char> parents = row_of(p.parents, p.parents != nullptr ? N * 4 : 0, host.row);
  if (p.parents != nullptr) c.parents = as<int32_t>(parents);
  const FactorsRow pending(p.has_pending ? p.pending : FactorsView{}, p.rec, host.row);
  if (p.has_pending) c.pending = pending.view();
  if (cpu::verify(c) != Status::kOk) return "the CPU backend refuses the shape";
  if (run(p, stream()) != Status::kOk) return "the CUDA backend refuses the shape";
  check(cudaDeviceSynchronize(), "verify");
  const auto tolerated = [&](DType dtype) {
    return tolerance(h.D, N + p.pending_path.max_length, p.strategy, p.precision, dtype);
  };
  std::string fault =
      compare("out", row_of(p.out, 2 * values() / B, host.row), out, p.dtype, tolerated(p.dtype));
  if (fault.empty()) {
    fault = compare("k", row_of(p.k_out, 4 * keys() / B, host.row), k, DType::kFloat32,
                    tolerated(DType::kFloat32));
  }
  if (fault.empty()) {
    fault = compare("g", row_of(p.g_out, 4 * gates() / B, host.row), g, DType::kFloat32,
                    tolerated(DType::kFloat32));
  }
  if (fault.empty()) {
    fault = compare("u", row_of(p.u_out, 4 * values() / B, host.row), u, DType::kFloat32,
                    // A bfloat16 state may have been rounded the other way.
                    tolerated(p.has_pending ? h.state : DType::kFloat32));
  }
  if (fault.empty() && p.has_pending) {
    fault = compare("state", row_of(p.state.data, state_bytes() / B, host.row), host.state, h.state,
                    tolerated(h.state));
  }
  return fault;
}

std::string Layers::wrong(const CommitParams& p) const {
  const int64_t row = B - 1;
  std::vector<char> want = row_of(p.state.data, state_bytes() / B, row);
  const FactorsRow factors(p.factors, p.rec, row);
  CommitParams c = p;
  c.B = 1;
  c.factors = factors.view();
  c.state.data = want.data(), c.state.slots = 1;
  if (cpu::commit(c) != Status::kOk) return "the CPU backend refuses the shape";
  if (cuda::commit(p, stream()) != Status::kOk) return "the CUDA backend refuses the shape";
  check(cudaDeviceSynchronize(), "commit");
  return compare("state", row_of(p.state.data, state_bytes() / B, row), want, h.state,
                 tolerance(h.D, p.path.max_length, Strategy::kSerial, Precision::kIeee, h.state));
}

std::string Layers::wrong(const PrefillParams& p) const {
  poison({{p.out, 2 * values()}});
  LastRow host(p);
  PrefillParams c = p;
  host.fill(c);
  c.precision = Precision::kIeee;
  std::vector<char> out(static_cast<size_t>(2 * values() / B));
  c.out = out.data();
  if (cpu::prefill(c) != Status::kOk) return "the CPU backend refuses the shape";
  if (cuda::prefill(p, stream()) != Status::kOk) return "the CUDA backend refuses the shape";
  check(cudaDeviceSynchronize(), "prefill");
  // Gates of exp(-0.05) on average leave a millionth after 256 tokens: roundings older than that are gone.
  const int64_t tokens = std::min<int64_t>(N, 256);
  const auto tolerated = [&](DType dtype) {
    return tolerance(h.D, tokens, Strategy::kSolve, p.precision, dtype);
  };
  std::string fault =
      compare("out", row_of(p.out, 2 * values() / B, host.row), out, p.dtype, tolerated(p.dtype));
  if (fault.empty()) {
    fault = compare("state", row_of(p.state.data, state_bytes() / B, host.row), host.state, h.state,
                    tolerated(h.state));
  }
  return fault;
}

Time steps(const Heads& heads, int64_t B, int64_t tokens) {
  static std::map<std::pair<std::string, int64_t>, Time> known;
  const auto key = std::make_pair(std::string(heads.name), B);
  auto found = known.find(key);
  if (found == known.end()) {
    const Layers layers(heads, B, 1, 1);
    const auto params = [&](int64_t set) { return layers.verify(set, Strategy::kSerial, false, 1); };
    Time one = {-1.0, kTooSmall};
    if (layers.sets() > 0) {
      one =
          checked(layers, params(0), [&](int64_t set, cudaStream_t s) { return layers.run(params(set), s); });
    }
    found = known.emplace(key, one).first;
  }
  return {static_cast<double>(tokens) * found->second.us, found->second.error};
}

}  // namespace specdec::bench
