// One level of drafts through a recurrent drafter, as other bindings of this library call it.
#pragma once

#include "block.h"

namespace specdec::binding {

// A one-block drafter and where its sequences stand.
struct DrafterArgs {
  const Tensor& table;
  const OptionalTensor &own_norm, &own_weight;
  const std::vector<Tensor>& weights;
  const OptionalTensor& conv_bias;
  bool gated;
  double eps;
  bool neg_eigval;
  const Tensor &conv_state, &state;
  const OptionalTensor& slots;
  const Tensor &norm, &head;
  int64_t vocab;
  std::optional<double> scale;
};

// Logits of the new nodes; then, of the prefix's nodes and the new ones, outputs, raw projections and factors
// k, u, g.
using DraftStep = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

DraftStep draft_step(const Tensor& tokens, const OptionalTensor& parents, const OptionalTensor& lengths,
                     const Tensor& outputs, const DrafterArgs& drafter, const BlockPrefix& prefix,
                     int64_t strategy);

}  // namespace specdec::binding
