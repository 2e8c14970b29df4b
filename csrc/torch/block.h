// A whole Gated DeltaNet block, as other bindings of this library call it.
#pragma once

#include "layer.h"

namespace specdec::binding {

// The weights of a block in the order of the operators' list; without the last three it has no MLP.
class BlockWeights {
 public:
  explicit BlockWeights(const std::vector<Tensor>& list) : list_(list) {
    STD_TORCH_CHECK(list.size() == 7 || list.size() == 10, "weights: got ", list.size(),
                    " tensors, want 10, or 7 without an MLP");
    check_shape(conv(), "weights[2] (conv_weight)", {-1, -1}, "[C, W]");
    if (has_mlp()) check_given(down(), "weights[9] (down)");
  }

  bool has_mlp() const { return list_.size() == 10; }
  const Tensor& mixer_norm() const { return list_[0]; }
  const Tensor& projections() const { return list_[1]; }
  const Tensor& conv() const { return list_[2]; }
  const Tensor& A_log() const { return list_[3]; }
  const Tensor& dt_bias() const { return list_[4]; }
  const Tensor& head_norm() const { return list_[5]; }
  const Tensor& out() const { return list_[6]; }
  const Tensor& mlp_norm() const { return list_[7]; }
  const Tensor& gate_up() const { return list_[8]; }
  const Tensor& down() const { return list_[9]; }

 private:
  const std::vector<Tensor>& list_;
};

// What both forms take besides x and the earlier nodes.
struct BlockArgs {
  const std::vector<Tensor>& weights;
  const OptionalTensor& conv_bias;
  bool gated;  // the projections make an output gate
  double eps;
  bool neg_eigval;
  const Tensor &conv_state, &state;
  const OptionalTensor &slots, &parents, &lengths;
  std::optional<double> scale;
  int64_t strategy;
};

// Factors and raw projections of nodes that were verified already and not committed; all empty for none.
struct BlockPrefix {
  const OptionalTensor &k, &u, &g, &parents, &mixed;
};

using BlockOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;  // x, o, mixed, k, u, g

BlockOutputs verify_block(const Tensor& x, const BlockArgs& args, const BlockPrefix& prefix);

}  // namespace specdec::binding
