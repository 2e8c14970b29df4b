// One level of drafts through blocks that draft, as other bindings of this library call it.
#pragma once

#include "stack.h"

namespace specdec::binding {

// What drafts, and where its sequences stand.
struct DrafterArgs {
  const Tensor& table;                          // [V, D]: what a token adds to the first block's input
  const OptionalTensor &own_norm, &own_weight;  // [D], [D, D] packed, of the parent's output; both or none
  const StackArgs& stack;
  // Between blocks and norm: norm [D], gate and up [2 F, D], down [D, F]; or none.
  const std::vector<Tensor>& adapter;
  double adapter_eps;
  const Tensor &norm, &head;  // [D], [V', D] packed
  int64_t vocab;              // V'
};

// The nodes that are run already.
struct Continued {
  const Tensor& outputs;              // [B, NP, D] of the last block
  const std::vector<Tensor>& prefix;  // entries of each mixer
  const OptionalTensor& parents;      // [B, NP]
};

struct DraftStep {
  Tensor logits;  // [R, V'] of the new nodes
  // Of the nodes that were run already and the new ones:
  Tensor outputs;               // [B, NP + N, D]
  std::vector<Tensor> entries;  // of each mixer
};

// tokens and parents [B, N], lengths [B]; the parents are nodes that were run already.
DraftStep draft_step(const Tensor& tokens, const OptionalTensor& parents, const OptionalTensor& lengths,
                     const DrafterArgs& drafter, const Continued& earlier, int64_t strategy);

}  // namespace specdec::binding
