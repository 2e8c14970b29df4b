#include "commit.cuh"
#include "instances.cuh"
#include "launch.cuh"

namespace specdec::cuda {

SPECDEC_TILE_INSTANCES(Commit, bfloat16, 192)

}  // namespace specdec::cuda
