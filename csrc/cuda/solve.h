// The ops that solve on tensor cores: they choose an instance from the parameters.
#pragma once

#include "kernel.h"
#include "specdec/params.h"

namespace specdec::cuda {

// Strategy::kSolve. Refuses (kUnsupported): a prefix, more than kMaxSolveNodes nodes, Precision::kIeee, DK or DV that
// is no multiple of 32, DK above 256, and a state that is not aligned to 16 bytes.
Status verify_solve(const VerifyParams& p, Stream stream);

// Refuses as above.
Status prefill(const PrefillParams& p, Stream stream);

}  // namespace specdec::cuda
