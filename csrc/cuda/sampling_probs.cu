#include "launch.cuh"
#include "sampling_probs.cuh"

namespace specdec::cuda {

SPECDEC_INSTANCE(SamplingProbs, float, true)
SPECDEC_INSTANCE(SamplingProbs, float, false)
SPECDEC_INSTANCE(SamplingProbs, bfloat16, true)
SPECDEC_INSTANCE(SamplingProbs, bfloat16, false)
SPECDEC_INSTANCE(SamplingProbs, half, true)
SPECDEC_INSTANCE(SamplingProbs, half, false)

}  // namespace specdec::cuda
