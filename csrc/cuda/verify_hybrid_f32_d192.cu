#include "instances.cuh"
#include "launch.cuh"
#include "verify_hybrid.cuh"

namespace specdec::cuda {

SPECDEC_USUAL_TILE_INSTANCES(VerifyHybrid, float, 192)

}  // namespace specdec::cuda
