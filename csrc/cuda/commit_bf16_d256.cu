#include "commit.cuh"
#include "instances.cuh"
#include "launch.cuh"

namespace specdec::cuda {

SPECDEC_TILE_INSTANCES(Commit, bfloat16, 256)
SPECDEC_NARROW_TILE_INSTANCES(Commit, bfloat16, 256)

}  // namespace specdec::cuda
