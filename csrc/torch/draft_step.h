// One level of drafts through a recurrent drafter, as other bindings of this library call it.
#pragma once

#include "block.h"

namespace specdec::binding {

// A one-block drafter and where its sequences stand.
struct DrafterArgs {
  const Tensor& table;                          // [V, D]: what a token adds to the block's input
  const OptionalTensor &own_norm, &own_weight;  // [D], [D, D] packed, of the parent's output; both or none
  const std::vector<Tensor>& weights;           // see BlockWeights
  const OptionalTensor& conv_bias;
  bool gated;
  double eps;
  bool neg_eigval;
  const Tensor &conv_state, &state;
  const OptionalTensor& slots;
  const Tensor &norm, &head;  // [D], [V', D] packed
  int64_t vocab;              // V'
  std::optional<double> scale;
};

// Logits [R, V'] of the new nodes; then, of the prefix's nodes and the new ones, outputs [B, NP + N, D], raw
// projections [B, NP + N, C] and factors k, u, g.
using DraftStep = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// tokens and parents [B, N], lengths [B], outputs [B, NP, D]; the parents are nodes of the prefix.
DraftStep draft_step(const Tensor& tokens, const OptionalTensor& parents, const OptionalTensor& lengths,
                     const Tensor& outputs, const DrafterArgs& drafter, const BlockPrefix& prefix,
                     int64_t strategy);

}  // namespace specdec::binding
