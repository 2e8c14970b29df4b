// accept_greedy, accept_sampled and sampling_probs of chains over a vocabulary of 151936 tokens.
#include <algorithm>
#include <vector>

#include "../../../csrc/cpu/ops.h"
#include "../../../csrc/cuda/ops.h"
#include "../../../tests/cpp/buffer.h"
#include "measure.h"

namespace specdec::bench {
namespace {

using gpu::check;
using gpu::DeviceMemory;

constexpr int64_t kVocabulary = 151936;

template <typename T>
std::vector<T> download(const DeviceMemory& memory) {
  std::vector<T> host(memory.bytes() / sizeof(T));
  check(cudaMemcpy(host.data(), memory.data(), memory.bytes(), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return host;
}

template <typename T>
DeviceMemory upload(const std::vector<T>& host) {
  DeviceMemory memory(host.size() * sizeof(T));
  check(cudaMemcpy(memory.data(), host.data(), memory.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
  return memory;
}

// Rows of every set, one row of `width` bytes a node; what the last sequence decides is on the host.
struct Rounds {
  Rounds(int64_t B_, int64_t N_, DType dtype, int64_t arrays, double shift) : B(B_), N(N_) {
    row = kVocabulary * (dtype == DType::kFloat32 ? 4 : 2);
    sets = rotation(static_cast<double>(arrays * B * N * row));
    if (sets <= 0) return;
    for (int64_t i = 0; i < arrays; ++i) {
      rows.emplace_back(static_cast<size_t>(sets * B * N * row));
      fill(rows.back(), dtype, 1.0, shift, 7 + static_cast<unsigned>(i));
    }
    path = DeviceMemory(static_cast<size_t>(B * N * 4)), lengths = DeviceMemory(static_cast<size_t>(B * 4));
    next = DeviceMemory(static_cast<size_t>(B * 8));
  }
  // Row n of the last sequence of set 0.
  std::vector<char> last(const DeviceMemory& array, int64_t n) const {
    std::vector<char> host(static_cast<size_t>(row));
    check(cudaMemcpy(host.data(), static_cast<const char*>(array.data()) + ((B - 1) * N + n) * row,
                     host.size(), cudaMemcpyDeviceToHost),
          "cudaMemcpy");
    return host;
  }
  template <typename Params>
  void describe(Params& p) const {
    p.B = B, p.N = N, p.V = kVocabulary;
    p.draft.tokens = static_cast<const int64_t*>(tokens.data());
    p.accepted = {static_cast<int32_t*>(path.data()), static_cast<int32_t*>(lengths.data()),
                  static_cast<int64_t*>(next.data()), N};
  }

  int64_t B, N, row, sets;
  std::vector<DeviceMemory> rows;
  DeviceMemory tokens, path, lengths, next, space;
};

Result greedy(int64_t B, int64_t N) {
  Rounds r(B, N, DType::kBFloat16, 1, 0.0);
  if (r.sets <= 0) return {{-1.0, kTooSmall}};
  // Every draft of the last sequence is right.
  std::vector<int64_t> want, tokens(static_cast<size_t>(B * N), 0);
  for (int64_t n = 0; n < N; ++n) {
    const std::vector<char> logits = r.last(r.rows[0], n);
    int64_t best = 0;
    for (int64_t i = 1; i < kVocabulary; ++i) {
      if (test::widen(logits.data(), DType::kBFloat16, i) >
          test::widen(logits.data(), DType::kBFloat16, best))
        best = i;
    }
    want.push_back(best);
    if (n + 1 < N) tokens[(B - 1) * N + n + 1] = best;
  }
  r.tokens = upload(tokens);
  const auto params = [&](int64_t set) {
    AcceptGreedyParams p;
    r.describe(p);
    p.logits = static_cast<const char*>(r.rows[0].data()) + set * B * N * r.row;
    p.dtype = DType::kBFloat16, p.stride_b = N * kVocabulary, p.stride_n = kVocabulary;
    return p;
  };
  const int64_t bytes = cuda::accept_greedy_workspace_bytes(params(0));
  r.space = DeviceMemory(static_cast<size_t>(bytes));
  const auto call = [&](int64_t set, cudaStream_t s) {
    return cuda::accept_greedy(params(set), {r.space.data(), bytes}, s);
  };
  if (call(0, stream()) != Status::kOk) return {{-1.0, "the CUDA backend refuses the shape"}};
  if (download<int32_t>(r.lengths).back() != N || download<int64_t>(r.next).back() != want.back()) {
    return {{-1.0, "the accepted path or the next token is wrong"}};
  }
  return {replay(call, r.sets), static_cast<double>(B * N * r.row)};
}

// What an op takes for every row alike.
struct Settings {
  Settings(int64_t rows, float t, int32_t k, float p)
      : temperature(upload(std::vector<float>(static_cast<size_t>(rows), t))),
        top_p(upload(std::vector<float>(static_cast<size_t>(rows), p))),
        min_p(upload(std::vector<float>(static_cast<size_t>(rows), 0.0f))),
        top_k(upload(std::vector<int32_t>(static_cast<size_t>(rows), k))) {}
  SamplingView view() const {
    return {static_cast<const float*>(temperature.data()), static_cast<const int32_t*>(top_k.data()),
            static_cast<const float*>(top_p.data()), static_cast<const float*>(min_p.data())};
  }

  DeviceMemory temperature, top_p, min_p, top_k;
};

// Of blocks that work on a row together.
struct TeamSpace {
  explicit TeamSpace(cuda::TeamWorkspace wanted)
      : space(wanted),
        values(static_cast<size_t>(wanted.values_count * 8)),
        counters(upload(std::vector<int32_t>(static_cast<size_t>(wanted.counters_count)))) {
    space.values = static_cast<uint64_t*>(values.data());
    space.counters = static_cast<int32_t*>(counters.data());
  }

  cuda::TeamWorkspace space;
  DeviceMemory values, counters;
};

// Traversal of a chain, block verification, whose drafts are rejected: their q is that of a uniform row but
// for their own token, which has all but nothing of p. So a sequence comes to every row but the last node's,
// and rejects at each.
Result sampled(int64_t B, int64_t N) {
  constexpr int64_t kDrafted = 5;
  Rounds r(B, N, DType::kBFloat16, 1, 0.0);
  if (r.sets <= 0) return {{-1.0, kTooSmall}};
  r.tokens = upload(std::vector<int64_t>(static_cast<size_t>(B * N), kDrafted));
  std::vector<float> q(kVocabulary, 0.5f / kVocabulary);
  q[kDrafted] = 0.5f;
  const DeviceMemory draft = upload(q);
  const size_t rows = static_cast<size_t>(B), nodes = static_cast<size_t>(B * N);
  const DeviceMemory draft_rows = upload(std::vector<int32_t>(nodes, 0));
  const DeviceMemory rules = upload(std::vector<int32_t>(rows, static_cast<int32_t>(AcceptRule::kTraversal)));
  const std::vector<uint64_t> host_seeds(rows, 11);
  const DeviceMemory seeds = upload(host_seeds), positions = upload(std::vector<int64_t>(rows, 100));
  const Settings settings(B, 1.0f, 0, 1.0f);
  const auto params = [&](int64_t set) {
    AcceptSampledParams p;
    r.describe(p);
    p.logits = static_cast<const char*>(r.rows[0].data()) + set * B * N * r.row;
    p.dtype = DType::kBFloat16, p.stride_b = N * kVocabulary, p.stride_n = kVocabulary;
    p.draft_probs = static_cast<const float*>(draft.data()), p.R = 1, p.draft_stride = kVocabulary;
    p.draft_rows = static_cast<const int32_t*>(draft_rows.data());
    p.rules = static_cast<const int32_t*>(rules.data());
    p.sampling = settings.view();
    p.seeds = static_cast<const uint64_t*>(seeds.data());
    p.positions = static_cast<const int64_t*>(positions.data());
    return p;
  };
  const TeamSpace space(cuda::accept_sampled_workspace(params(0)));
  const auto call = [&](int64_t set, cudaStream_t s) {
    return cuda::accept_sampled(params(set), space.space, s);
  };
  if (call(0, stream()) != Status::kOk) return {{-1.0, "the CUDA backend refuses the shape"}};
  const int32_t length = download<int32_t>(r.lengths).back();
  const int64_t token = download<int64_t>(r.next).back();
  // The CPU backend on the last sequence of set 0.
  AcceptSampledParams p = params(0);
  std::vector<char> logits;
  for (int64_t n = 0; n < N; ++n) {
    const std::vector<char> row = r.last(r.rows[0], n);
    logits.insert(logits.end(), row.begin(), row.end());
  }
  const std::vector<int64_t> tokens(static_cast<size_t>(N), kDrafted), host_positions(1, 100);
  const std::vector<int32_t> host_draft_rows(static_cast<size_t>(N), 0), top_k(1, 0),
      host_rules(1, static_cast<int32_t>(AcceptRule::kTraversal));
  const std::vector<float> ones(1, 1.0f), zeros(1, 0.0f);
  std::vector<int32_t> path(static_cast<size_t>(N)), path_length(1);
  std::vector<int64_t> next(1);
  p.B = 1, p.logits = logits.data(), p.draft_probs = q.data(), p.draft_rows = host_draft_rows.data();
  p.rules = host_rules.data(), p.sampling = {ones.data(), top_k.data(), ones.data(), zeros.data()};
  p.seeds = host_seeds.data(), p.positions = host_positions.data(), p.draft.tokens = tokens.data();
  p.accepted = {path.data(), path_length.data(), next.data(), N};
  if (cpu::accept_sampled(p) != Status::kOk || path_length[0] != length || next[0] != token) {
    return {{-1.0, "the accepted path or the next token is not the CPU backend's"}};
  }
  return {replay(call, r.sets), static_cast<double>(B * (N - 1) * r.row)};
}

Result probabilities(int64_t R, int32_t top_k, float top_p) {
  Rounds r(R, 1, DType::kBFloat16, 1, 0.0);
  if (r.sets <= 0) return {{-1.0, kTooSmall}};
  const Settings settings(R, 1.0f, top_k, top_p);
  const DeviceMemory probs(static_cast<size_t>(R * kVocabulary * 4));
  const auto params = [&](int64_t set) {
    SamplingProbsParams p;
    p.R = R, p.V = kVocabulary, p.dtype = DType::kBFloat16, p.stride = kVocabulary;
    p.logits = static_cast<const char*>(r.rows[0].data()) + set * R * r.row;
    p.sampling = settings.view();
    p.probs = static_cast<float*>(probs.data());
    return p;
  };
  const TeamSpace space(cuda::sampling_probs_workspace(params(0)));
  const auto call = [&](int64_t set, cudaStream_t s) {
    return cuda::sampling_probs(params(set), space.space, s);
  };
  if (call(0, stream()) != Status::kOk) return {{-1.0, "the CUDA backend refuses the shape"}};
  const std::vector<float> all = download<float>(probs);
  const std::vector<char> logits = r.last(r.rows[0], 0);
  std::vector<float> want(kVocabulary);
  const float one = 1.0f, zero = 0.0f;
  SamplingProbsParams p = params(0);
  p.R = 1, p.logits = logits.data(), p.sampling = {&one, &top_k, &top_p, &zero}, p.probs = want.data();
  if (cpu::sampling_probs(p) != Status::kOk ||
      !std::equal(want.begin(), want.end(), all.end() - kVocabulary)) {
    return {{-1.0, "the probabilities are not the CPU backend's"}};
  }
  return {replay(call, r.sets), static_cast<double>(R * (r.row + kVocabulary * 4))};
}

}  // namespace

void add_acceptance() {
  for (const int64_t B : {1, 32}) {
    for (const int64_t N : {1, 8, 32}) {
      const std::string shape = "/B:" + std::to_string(B) + "/N:" + std::to_string(N);
      add("accept_greedy" + shape, [=] { return greedy(B, N); });
      if (N > 1) add("accept_sampled/block" + shape, [=] { return sampled(B, N); });
    }
    const std::string rows = "/R:" + std::to_string(B);
    add("sampling_probs" + rows, [=] { return probabilities(B, 0, 1.0f); });
    add("sampling_probs/nucleus" + rows, [=] { return probabilities(B, 50, 0.95f); });
  }
}

}  // namespace specdec::bench
