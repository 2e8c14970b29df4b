#include "launch.cuh"
#include "prefill.cuh"

namespace specdec::cuda {

SPECDEC_INSTANCE(Prefill, SolveTraits<Precision::kBf16, false, 32>)
SPECDEC_INSTANCE(Prefill, SolveTraits<Precision::kBf16, false, 64>)
SPECDEC_INSTANCE(Prefill, SolveTraits<Precision::kBf16, true, 16>)
SPECDEC_INSTANCE(Prefill, SolveTraits<Precision::kBf16, true, 32>)

}  // namespace specdec::cuda
