// Which instances of acceptance exist, and which launches a call takes.
#include "accept_greedy.cuh"
#include "accept_sampled.cuh"
#include "draw_tokens.cuh"
#include "ops.h"
#include "sampling_probs.cuh"

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

// f(element of the type)
template <typename F>
Status of_type(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(float{});
    case DType::kBFloat16:
      return f(bfloat16{});
    case DType::kFloat16:
      return f(half{});
  }
  return Status::kUnsupported;
}

int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

TeamView with(TeamView view, const TeamWorkspace& workspace) {
  view.values = workspace.values;
  view.counters = workspace.counters;
  return view;
}

TeamWorkspace wanted_by(const TeamView& view) {
  return {nullptr, nullptr, view.values_count(), view.counters_count()};
}

TeamView teams_of(const AcceptSampledParams& p) { return teams_for(p.B, p.V, kBins); }
TeamView teams_of(const SamplingProbsParams& p) { return teams_for(p.R, p.V, kBins); }
TeamView teams_of(const DrawParams& p) { return teams_for(p.R, p.V, kBins); }

// kOk: the teams have what they want, and rows of V elements are not too long for them.
Status check(const TeamView& view, const TeamWorkspace& workspace, int64_t V) {
  if (V < 1) return Status::kInvalidArgument;
  if (parts_of(V) > kMaxParts) return Status::kUnsupported;
  return workspace.values_count >= view.values_count() && workspace.counters_count >= view.counters_count()
             ? Status::kOk
             : Status::kInvalidArgument;
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
  const bool vector = aligned(p.logits, size_of(p.dtype), p.V, p.stride_b, p.stride_n);
  return of_type(p.dtype, [&](auto x) { return run_greedy<decltype(x)>(work, vector, stream); });
}

TeamWorkspace accept_sampled_workspace(const AcceptSampledParams& p) { return wanted_by(teams_of(p)); }

Status accept_sampled(const AcceptSampledParams& p, const TeamWorkspace& workspace, Stream stream) {
  const TeamView view = teams_of(p);
  Status status = check(p.B, p.N, p.V, p.accepted);
  if (status == Status::kOk) status = check(view, workspace, p.V);
  if (status != Status::kOk) return status;
  if (p.N > kMaxSampledNodes) return Status::kUnsupported;
  const AcceptSampledWork work{p, with(view, workspace)};
  const bool vector = aligned(p.logits, size_of(p.dtype), p.V, p.stride_b, p.stride_n) &&
                      aligned(p.draft_probs, 4, p.V, p.draft_stride, 0);
  return of_type(p.dtype, [&](auto x) {
    using T = decltype(x);
    return vector ? launch<AcceptSampled<T, true>>(work, stream)
                  : launch<AcceptSampled<T, false>>(work, stream);
  });
}

TeamWorkspace sampling_probs_workspace(const SamplingProbsParams& p) { return wanted_by(teams_of(p)); }

Status sampling_probs(const SamplingProbsParams& p, const TeamWorkspace& workspace, Stream stream) {
  const TeamView view = teams_of(p);
  const Status status = check(view, workspace, p.V);
  if (status != Status::kOk) return status;
  const SamplingProbsWork work{p, with(view, workspace)};
  const bool vector = aligned(p.logits, size_of(p.dtype), p.V, p.stride, 0);
  return of_type(p.dtype, [&](auto x) {
    using T = decltype(x);
    return vector ? launch<SamplingProbs<T, true>>(work, stream)
                  : launch<SamplingProbs<T, false>>(work, stream);
  });
}

TeamWorkspace draw_tokens_workspace(const DrawParams& p) { return wanted_by(teams_of(p)); }

Status draw_tokens(const DrawParams& p, const TeamWorkspace& workspace, Stream stream) {
  const TeamView view = teams_of(p);
  const Status status = check(view, workspace, p.V);
  if (status != Status::kOk) return status;
  const DrawTokensWork work{p, with(view, workspace)};
  return aligned(p.probs, 4, p.V, p.stride, 0) ? launch<DrawTokens<true>>(work, stream)
                                               : launch<DrawTokens<false>>(work, stream);
}

}  // namespace specdec::cuda
