// Verification as a masked triangular solve.
#pragma once

#include "specdec/params.h"

namespace specdec::cpu::SPECDEC_ISA {

// Up to kMaxSolveNodes nodes, no prefix. The numbers of a node depend on its sequence alone, but their
// rounding is not that of the step.
Status verify_solve(const VerifyParams& p);

}  // namespace specdec::cpu::SPECDEC_ISA
