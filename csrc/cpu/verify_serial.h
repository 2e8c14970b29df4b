// Serial and hybrid verification: the passes of a plan over tiles of value rows.
#pragma once

#include "specdec/layer_params.h"

namespace specdec::cpu::SPECDEC_ISA {

Status verify_serial(const VerifyParams& p);
// With what the layer has around it; `check_layer` has passed.
Status verify_serial(const VerifyLayerParams& p);

}  // namespace specdec::cpu::SPECDEC_ISA
