#include "commit.cuh"
#include "instances.cuh"
#include "launch.cuh"

namespace specdec::cuda {

SPECDEC_TILE_INSTANCES(Commit, float, 32)

}  // namespace specdec::cuda
