// A whole Gated DeltaNet block, as other bindings of this library call it.
#pragma once

#include "layer.h"

namespace specdec::binding {

constexpr int64_t kMixerWeights = 7, kMlpWeights = 3;

// The weights of a block in the order of the operators' list: those of a mixer, of an MLP, or of both.
class BlockWeights {
 public:
  BlockWeights(const Tensor* list, int64_t count) : list_(list), count_(count) {
    STD_TORCH_CHECK(count == kMixerWeights || count == kMlpWeights || count == kMixerWeights + kMlpWeights,
                    "weights: got ", count, " tensors, want 10, 7 without an MLP or 3 without a mixer");
    if (has_mixer()) check_shape(conv(), "weights[2] (conv_weight)", {-1, -1}, "[C, W]");
    if (has_mlp()) check_given(down(), "weights[9] (down)");
  }

  bool has_mixer() const { return count_ >= kMixerWeights; }
  bool has_mlp() const { return count_ != kMixerWeights; }
  const Tensor& mixer_norm() const { return list_[0]; }   // [D]
  const Tensor& projections() const { return list_[1]; }  // [C (+ HV DV) + 2 HV, D] packed, as all matrices
  const Tensor& conv() const { return list_[2]; }         // [C, W]
  const Tensor& A_log() const { return list_[3]; }        // [HV]
  const Tensor& dt_bias() const { return list_[4]; }      // [HV]
  const Tensor& head_norm() const { return list_[5]; }    // [DV]
  const Tensor& out() const { return list_[6]; }          // [D, HV DV]
  const Tensor& mlp_norm() const { return mlp()[0]; }     // [D]
  const Tensor& gate_up() const { return mlp()[1]; }      // [2 F, D]
  const Tensor& down() const { return mlp()[2]; }         // [D, F]

 private:
  const Tensor* mlp() const { return list_ + count_ - kMlpWeights; }

  const Tensor* list_;
  int64_t count_;
};

// What both forms take besides x and the earlier nodes; see verify_layer.
struct BlockArgs {
  const BlockWeights& weights;
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

// Those of the last round and the path of it that is committed.
struct BlockPending {
  const Tensor &k, &u;
  const OptionalTensor &g, &path, &path_lengths;
  const Tensor& mixed;
};

// x [B, N, D], o [B, N, HV, DV], mixed [B, N, C], and the factors k, u, g.
using BlockOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// x [B, N, D]; the block has a mixer.
BlockOutputs verify_block(const Tensor& x, const BlockArgs& args, const BlockPrefix& prefix);
BlockOutputs verify_block_deferred(const Tensor& x, const BlockArgs& args, const BlockPending& pending);

// The MLP of a block with its norm before it, added to x [B, N, D].
Tensor block_mlp(const Tensor& x, const BlockWeights& weights, double eps);

}  // namespace specdec::binding
