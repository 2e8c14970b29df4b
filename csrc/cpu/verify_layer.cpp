// verify_layer: verification from raw projections to normed heads in one call. The work is that of the serial
// verification; the thread that steps a head makes its tokens first.
#include "ops.h"
#include "verify_serial.h"

namespace specdec::cpu::SPECDEC_ISA {

Status verify_layer(const VerifyLayerParams& p) {
  const Status checked = check_layer(p);
  return checked == Status::kOk ? verify_serial(p) : checked;
}

}  // namespace specdec::cpu::SPECDEC_ISA
