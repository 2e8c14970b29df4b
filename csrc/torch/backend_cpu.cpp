// The CPU kernels as a backend.
#include "../cpu/ops.h"
#include "backend.h"

namespace specdec::binding {

bool values_on_host() { return true; }

bool on_tensor_cores() { return false; }

// The dispatcher comes here for tensors on a CPU alone.
Device device_of(const Operands&) { return {}; }

Status run(const VerifyParams& p, const Operands&, NamedTensors) { return cpu::verify(p); }
Status run(const VerifyLayerParams& p, const Operands&, NamedTensors) { return cpu::verify_layer(p); }
Status run(const CommitParams& p, const Operands&) { return cpu::commit(p); }
Status run(const PrefillParams& p, const Operands&, NamedTensors) { return cpu::prefill(p); }
Status run(const ConvVerifyParams& p, const Operands&, NamedTensors) { return cpu::conv_verify(p); }
Status run(const ConvCommitParams& p, const Operands&) { return cpu::conv_commit(p); }
Status run(const AcceptGreedyParams& p, const Operands&, NamedTensors) { return cpu::accept_greedy(p); }
Status run(const AcceptSampledParams& p, const Operands&, NamedTensors) { return cpu::accept_sampled(p); }
Status run(const SamplingProbsParams& p, const Operands&, NamedTensors) { return cpu::sampling_probs(p); }
Status run(const DrawParams& p, const Operands&, NamedTensors) { return cpu::draw_tokens(p); }
Status run(const TreeAttentionParams& p, const Operands&, NamedTensors) { return cpu::tree_attention(p); }

}  // namespace specdec::binding
