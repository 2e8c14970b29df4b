// Which instances of acceptance exist, and which launches a call takes.
#include "accept_greedy.cuh"
#include "ops.h"

namespace specdec::cuda {

namespace {

// Rows that begin at multiples of 16 bytes and are whole vectors.
bool aligned(const void* data, int64_t size, int64_t V, int64_t stride_b, int64_t stride_n) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && V * size % 16 == 0 && stride_b * size % 16 == 0 &&
         stride_n * size % 16 == 0;
}

// A row holds the root token and something to choose from, and its path fits.
Status check(int64_t B, int64_t N, int64_t V, const AcceptedView& accepted) {
  if (accepted.max_length < N || V < 1) return Status::kInvalidArgument;
  return B > INT32_MAX || N > kMaxAcceptNodes || V > INT32_MAX ? Status::kUnsupported : Status::kOk;
}

template <typename T>
Status run_greedy(const AcceptGreedyWork& work, bool vector, Stream stream) {
  const Status status =
      vector ? launch<GreedyParts<T, true>>(work, stream) : launch<GreedyParts<T, false>>(work, stream);
  return status == Status::kOk ? launch<GreedyWalk>(work, stream) : status;
}

}  // namespace

int64_t accept_greedy_workspace_bytes(const AcceptGreedyParams& p) {
  return p.B * p.N * AcceptGreedyWork{p}.parts() * static_cast<int64_t>(sizeof(uint64_t));
}

Status accept_greedy(const AcceptGreedyParams& p, Workspace workspace, Stream stream) {
  const Status status = check(p.B, p.N, p.V, p.accepted);
  if (status != Status::kOk) return status;
  if (workspace.bytes < accept_greedy_workspace_bytes(p)) return Status::kInvalidArgument;
  const AcceptGreedyWork work{p, static_cast<uint64_t*>(workspace.data)};
  const bool vector = aligned(p.logits, p.dtype == DType::kFloat32 ? 4 : 2, p.V, p.stride_b, p.stride_n);
  switch (p.dtype) {
    case DType::kFloat32:
      return run_greedy<float>(work, vector, stream);
    case DType::kBFloat16:
      return run_greedy<bfloat16>(work, vector, stream);
    case DType::kFloat16:
      return run_greedy<half>(work, vector, stream);
  }
  return Status::kUnsupported;
}

}  // namespace specdec::cuda
