// accept_greedy of chains over a vocabulary of 151936 tokens.
#include <vector>

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

}  // namespace

void add_acceptance() {
  for (const int64_t B : {1, 32}) {
    for (const int64_t N : {1, 8, 32}) {
      const std::string shape = "/B:" + std::to_string(B) + "/N:" + std::to_string(N);
      add("accept_greedy" + shape, [=] { return greedy(B, N); });
    }
  }
}

}  // namespace specdec::bench
