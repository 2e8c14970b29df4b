// The CUDA backend's entry points. Each checks what its kernels may assume, chooses the instance and starts
// it on the stream: no allocation, no wait, so that calls can be captured in a CUDA graph.
#pragma once

#include <cstdint>

#include "kernel.h"
#include "layer_limits.h"
#include "specdec/acceptance_params.h"
#include "specdec/attention_params.h"
#include "specdec/layer_params.h"
#include "specdec/params.h"

namespace specdec::cuda {

// Memory of the device for one call at a time, aligned to 16 bytes; contents do not matter.
struct Workspace {
  void* data = nullptr;
  int64_t bytes = 0;
};

// That of a verification.
struct VerifyWorkspace {
  float* states = nullptr;      // aligned to 16 bytes; contents do not matter
  int32_t* counters = nullptr;  // zero when they are used first; every call leaves zeros
  int64_t states_count = 0, counters_count = 0;
};

// What `verify` wants for the call (counts alone); no pointer of `p` is read but for being null.
VerifyWorkspace verify_workspace(const VerifyParams& p);

// kUnsupported: a shape, type, stride or strategy that no kernel has, or too small a workspace.
Status verify(const VerifyParams& p, const VerifyWorkspace& workspace, Stream stream);

// A layer between its projections in one launch, by the serial kernel whichever strategy is asked for: the
// bits are the same. kUnsupported: DK other than 64, 128 and 256, a gate per channel, a convolution of more
// than four taps, trees whose kept states do not fit.
VerifyWorkspace verify_layer_workspace(const VerifyLayerParams& p);
Status verify_layer(const VerifyLayerParams& p, const VerifyWorkspace& workspace, Stream stream);

// `verify` with Strategy::kSolve: no prefix, at most kMaxSolveNodes nodes, a Precision of tensor cores. DK
// and DV are multiples of 32, DK at most 256; the state is aligned to 16 bytes. The same holds for `prefill`.
Status verify_solve(const VerifyParams& p, Stream stream);
Status prefill(const PrefillParams& p, Stream stream);

Status commit(const CommitParams& p, Stream stream);

Status conv_verify(const ConvVerifyParams& p, Stream stream);
Status conv_commit(const ConvCommitParams& p, Stream stream);

// The workspace holds the answers of blocks of keys, which a second launch adds up; 0 where one block holds
// all that a sequence has room for.
int64_t tree_attention_workspace_bytes(const TreeAttentionParams& p);
Status tree_attention(const TreeAttentionParams& p, Workspace workspace, Stream stream);

int64_t accept_greedy_workspace_bytes(const AcceptGreedyParams& p);
Status accept_greedy(const AcceptGreedyParams& p, Workspace workspace, Stream stream);

// Of blocks that work on a row together.
struct TeamWorkspace {
  uint64_t* values = nullptr;   // contents do not matter
  int32_t* counters = nullptr;  // zero when they are used first; every call leaves zeros
  int64_t values_count = 0, counters_count = 0;
};

// kUnsupported: more than kMaxSampledNodes nodes, rows of more than 2^21 tokens.
TeamWorkspace accept_sampled_workspace(const AcceptSampledParams& p);
Status accept_sampled(const AcceptSampledParams& p, const TeamWorkspace& workspace, Stream stream);

// Teams on rows of logits or probabilities. kUnsupported: rows of more than 2^21 tokens.
TeamWorkspace sampling_probs_workspace(const SamplingProbsParams& p);
Status sampling_probs(const SamplingProbsParams& p, const TeamWorkspace& workspace, Stream stream);
TeamWorkspace draw_tokens_workspace(const DrawParams& p);
Status draw_tokens(const DrawParams& p, const TeamWorkspace& workspace, Stream stream);

}  // namespace specdec::cuda
