// Consecutive Gated DeltaNet blocks, as other bindings of this library call them.
#pragma once

#include "block.h"

namespace specdec::binding {

// Blocks some of whose sub-layers may be left out, and the pools of those that have a mixer.
struct StackArgs {
  const std::vector<Tensor>& weights;      // of all blocks, one's after the other's
  const std::vector<int64_t>& parts;       // of each block how many: 10, 7 without an MLP, 3 without a mixer
  const std::vector<Tensor>& conv_biases;  // of each mixer, or none
  bool gated;
  double eps;
  bool neg_eigval;
  const std::vector<Tensor>&conv_states, &states;  // of each mixer
  const OptionalTensor& slots;
  std::optional<double> scale;
};

// The nodes of a call.
struct StackNodes {
  const OptionalTensor &parents, &lengths;
  int64_t strategy;
};

constexpr int64_t kEntryParts = 4;  // of a mixer: the factors k, u, g and the raw projections

struct StackOutputs {
  std::vector<Tensor> hidden;   // after each block, [B, N, D]
  std::vector<Tensor> read;     // of each mixer o, [B, N, HV, DV]
  std::vector<Tensor> entries;  // of each mixer, kEntryParts each
};

// x [B, N, D]. `prefix` has the entries of nodes that were verified already; it is empty without such nodes.
StackOutputs verify_stack(const Tensor& x, const StackArgs& stack, const StackNodes& nodes,
                          const std::vector<Tensor>& prefix, const OptionalTensor& prefix_parents);

}  // namespace specdec::binding
