#include "commit.cuh"
#include "instances.cuh"
#include "launch.cuh"

namespace specdec::cuda {

SPECDEC_TILE_INSTANCES(Commit, float, 256)
SPECDEC_NARROW_TILE_INSTANCES(Commit, float, 256)

}  // namespace specdec::cuda
