#include "accept_sampled.cuh"
#include "launch.cuh"

namespace specdec::cuda {

SPECDEC_INSTANCE(AcceptSampled, float, true)
SPECDEC_INSTANCE(AcceptSampled, float, false)
SPECDEC_INSTANCE(AcceptSampled, bfloat16, true)
SPECDEC_INSTANCE(AcceptSampled, bfloat16, false)
SPECDEC_INSTANCE(AcceptSampled, half, true)
SPECDEC_INSTANCE(AcceptSampled, half, false)

}  // namespace specdec::cuda
