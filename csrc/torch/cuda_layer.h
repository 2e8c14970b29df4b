// Which layers the CUDA kernels take, in words: for the backends that run them.
#pragma once

#include "../cuda/ops.h"
#include "tensor_args.h"

namespace specdec::binding {

inline void check_layer_kernel(const VerifyLayerParams& p) {
  STD_TORCH_CHECK(cuda::has_layer_keys(p.verify.rec.DK), "state: got DK = ", p.verify.rec.DK,
                  ", want 64, 128 or 256 for a layer on a GPU");
  STD_TORCH_CHECK(p.prologue.W <= cuda::kLayerTaps, "conv_weight: got W = ", p.prologue.W, ", want 1 to ",
                  cuda::kLayerTaps, " for a layer on a GPU");
}

}  // namespace specdec::binding
