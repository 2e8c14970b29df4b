// verify: checks what a kernel may assume and hands over to the kernel of the strategy.
#include "simd.h"
#include "verify_serial.h"
#include "verify_solve.h"

namespace specdec::cpu::SPECDEC_ISA {

Status verify(const VerifyParams& p) {
  const Recurrence& rec = p.rec;
  if (rec.HK <= 0 || rec.HV % rec.HK != 0) return Status::kInvalidArgument;
  if ((rec.gate == Gate::kNone) != (p.g == nullptr)) return Status::kInvalidArgument;
  if ((rec.update == Update::kDelta) != (p.beta != nullptr)) return Status::kInvalidArgument;
  // A prefix hangs below the durable state; pending factors would move that state away under it.
  if (p.has_pending && p.has_prefix) return Status::kInvalidArgument;
  switch (p.strategy) {
    case Strategy::kSerial:
    case Strategy::kHybrid:
      return verify_serial(p);
    case Strategy::kSolve:
      return verify_solve(p);
  }
  return Status::kUnsupported;
}

}  // namespace specdec::cpu::SPECDEC_ISA
