#include "every_primitive.cuh"
#include "launch.cuh"

namespace specdec::cuda {

SPECDEC_INSTANCE(EveryPrimitive, bfloat16)

}  // namespace specdec::cuda
