#include "launch.cuh"
#include "verify_solve.cuh"

namespace specdec::cuda {

SPECDEC_INSTANCE(VerifySolve, SolveTraits<Precision::kTf32x3, false, 16>)
SPECDEC_INSTANCE(VerifySolve, SolveTraits<Precision::kTf32x3, false, 32>)
SPECDEC_INSTANCE(VerifySolve, SolveTraits<Precision::kTf32x3, true, 16>)
SPECDEC_INSTANCE(VerifySolve, SolveTraits<Precision::kTf32x3, true, 32>)

}  // namespace specdec::cuda
