// Entry point of the CPU backend for a layer between its projections; the others are in ops.h.
#pragma once

#include "specdec/layer_params.h"

namespace specdec::cpu {

Status verify_layer(const VerifyLayerParams& p);

}  // namespace specdec::cpu
