// Serial and hybrid verification: the passes of a plan over tiles of value rows.
#pragma once

#include "specdec/params.h"

namespace specdec::cpu::SPECDEC_ISA {

Status verify_serial(const VerifyParams& p);

}  // namespace specdec::cpu::SPECDEC_ISA
