#include "instances.cuh"
#include "launch.cuh"
#include "verify_hybrid.cuh"

namespace specdec::cuda {

SPECDEC_USUAL_TILE_INSTANCES(VerifyHybrid, bfloat16, 32)
SPECDEC_USUAL_TILE_INSTANCES(VerifyHybrid, bfloat16, 64)
SPECDEC_USUAL_TILE_INSTANCES(VerifyHybrid, bfloat16, 96)
SPECDEC_USUAL_TILE_INSTANCES(VerifyHybrid, bfloat16, 128)
SPECDEC_USUAL_TILE_INSTANCES(VerifyHybrid, bfloat16, 192)
SPECDEC_USUAL_TILE_INSTANCES(VerifyHybrid, bfloat16, 256)

}  // namespace specdec::cuda
