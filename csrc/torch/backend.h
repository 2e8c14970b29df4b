// What a library's backend is to its operators. backend_cpu.cpp, backend_cuda.cpp and backend_simt.cpp define
// it; each library links one of them with the same schemas, checks and registrations.
#pragma once

#include "operands.h"
#include "specdec/acceptance_params.h"
#include "specdec/attention_params.h"
#include "specdec/layer_params.h"

// SPECDEC_NAMESPACE and SPECDEC_DISPATCH_KEY come from the build: `specdec` and CPU or CUDA, `specdec_simt`
// and CPU.
#define SPECDEC_OPERATORS(m) STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, SPECDEC_DISPATCH_KEY, m)

namespace specdec::binding {

// Can a check read what is in the tensors without waiting for a device?
bool values_on_host();

// Do products of solve and prefill run on tensor cores, in a precision of theirs, or in float32 arithmetic?
bool on_tensor_cores();

// The device of all operands, where outputs belong. Refuses operands on another one.
Device device_of(const Operands& operands);

// Each runs the op on the operands of which `p` holds the pointers.
Status run(const VerifyParams& p, const Operands& operands, NamedTensors outputs);
Status run(const VerifyLayerParams& p, const Operands& operands, NamedTensors outputs);
Status run(const CommitParams& p, const Operands& operands);
Status run(const PrefillParams& p, const Operands& operands, NamedTensors outputs);
Status run(const ConvVerifyParams& p, const Operands& operands, NamedTensors outputs);
Status run(const ConvCommitParams& p, const Operands& operands);
Status run(const AcceptGreedyParams& p, const Operands& operands, NamedTensors outputs);
Status run(const AcceptSampledParams& p, const Operands& operands, NamedTensors outputs);
Status run(const SamplingProbsParams& p, const Operands& operands, NamedTensors outputs);
Status run(const DrawParams& p, const Operands& operands, NamedTensors outputs);
Status run(const TreeAttentionParams& p, const Operands& operands, NamedTensors outputs);

}  // namespace specdec::binding
