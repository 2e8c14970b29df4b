#include "launch.cuh"
#include "prefill.cuh"

namespace specdec::cuda {

SPECDEC_INSTANCE(Prefill, SolveTraits<Precision::kTf32x3, false, 32>)
SPECDEC_INSTANCE(Prefill, SolveTraits<Precision::kTf32x3, false, 64>)
SPECDEC_INSTANCE(Prefill, SolveTraits<Precision::kTf32x3, true, 16>)
SPECDEC_INSTANCE(Prefill, SolveTraits<Precision::kTf32x3, true, 32>)

}  // namespace specdec::cuda
