// Entry points of the CPU backend. Each one picks the widest instruction set that this machine has.
#pragma once

#include "specdec/acceptance_params.h"
#include "specdec/attention_params.h"
#include "specdec/dense_params.h"
#include "specdec/layer_params.h"
#include "specdec/params.h"

namespace specdec::cpu {

Status conv_verify(const ConvVerifyParams& p);
Status conv_commit(const ConvCommitParams& p);
Status verify(const VerifyParams& p);
Status verify_layer(const VerifyLayerParams& p);
Status commit(const CommitParams& p);
Status prefill(const PrefillParams& p);
Status linear(const LinearParams& p);
Status rms_norm(const RmsNormParams& p);
Status swiglu(const SwigluParams& p);
Status gated_delta_gates(const GatesParams& p);
Status accept_greedy(const AcceptGreedyParams& p);
Status accept_sampled(const AcceptSampledParams& p);
Status sampling_probs(const SamplingProbsParams& p);
Status draw_tokens(const DrawParams& p);
Status likeliest(const LikeliestParams& p);
Status rotate_heads(const RotateHeadsParams& p);
Status tree_attention(const TreeAttentionParams& p);

// "avx512", "avx2" or "portable": what the entry points run here. SPECDEC_CPU_ISA=avx2|portable in the
// environment asks for a narrower one (the tests use it to run every build on one machine).
const char* isa_name();

// The instruction sets that this library holds kernels for, separated by commas.
const char* isa_builds();

}  // namespace specdec::cpu
