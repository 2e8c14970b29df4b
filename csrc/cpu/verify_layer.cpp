// verify_layer: verification from raw projections to normed heads in one call. The work is that of the serial
// verification; the thread that steps a head makes its tokens first.
#include "layer_ops.h"
#include "verify_serial.h"

namespace specdec::cpu::SPECDEC_ISA {

Status verify_layer(const VerifyLayerParams& p) {
  const Status checked = check_layer(p);
  if (checked != Status::kOk) return checked;
  const VerifyParams& v = p.verify;
  if (!p.has_prologue && (v.rec.gate == Gate::kNone) != (v.g == nullptr)) return Status::kInvalidArgument;
  if (!p.has_prologue && (v.rec.update == Update::kDelta) != (v.beta != nullptr)) {
    return Status::kInvalidArgument;
  }
  return verify_serial(p);
}

}  // namespace specdec::cpu::SPECDEC_ISA
