#include "instances.cuh"
#include "launch.cuh"
#include "verify_hybrid.cuh"

namespace specdec::cuda {

SPECDEC_USUAL_TILE_INSTANCES(VerifyHybrid, float, 32)
SPECDEC_USUAL_TILE_INSTANCES(VerifyHybrid, float, 64)
SPECDEC_USUAL_TILE_INSTANCES(VerifyHybrid, float, 96)
SPECDEC_USUAL_TILE_INSTANCES(VerifyHybrid, float, 128)
SPECDEC_USUAL_TILE_INSTANCES(VerifyHybrid, float, 192)
SPECDEC_USUAL_TILE_INSTANCES(VerifyHybrid, float, 256)

}  // namespace specdec::cuda
