// The activation of the short convolution and of the gated norm, which rounds alike wherever it is computed.
#pragma once

#include "primitives.cuh"

namespace specdec::cuda {

SPECDEC_DEVICE float silu(float x) { return x / (1.0f + exp(-x)); }

}  // namespace specdec::cuda
