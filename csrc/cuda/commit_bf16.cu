#include "commit.cuh"
#include "instances.cuh"
#include "launch.cuh"

namespace specdec::cuda {

SPECDEC_USUAL_TILE_INSTANCES(Commit, bfloat16, 32)
SPECDEC_USUAL_TILE_INSTANCES(Commit, bfloat16, 64)
SPECDEC_USUAL_TILE_INSTANCES(Commit, bfloat16, 96)
SPECDEC_USUAL_TILE_INSTANCES(Commit, bfloat16, 128)
SPECDEC_USUAL_TILE_INSTANCES(Commit, bfloat16, 192)
SPECDEC_USUAL_TILE_INSTANCES(Commit, bfloat16, 256)
SPECDEC_TALL_TILE_INSTANCES(Commit, bfloat16, 64)
SPECDEC_TALL_TILE_INSTANCES(Commit, bfloat16, 128)
SPECDEC_INSTANCE(Commit, Tile<false, bfloat16, 256, kTall>)

}  // namespace specdec::cuda
