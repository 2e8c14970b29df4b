#include "commit.cuh"
#include "instances.cuh"
#include "launch.cuh"

namespace specdec::cuda {

SPECDEC_USUAL_TILE_INSTANCES(Commit, float, 32)
SPECDEC_USUAL_TILE_INSTANCES(Commit, float, 64)
SPECDEC_USUAL_TILE_INSTANCES(Commit, float, 96)
SPECDEC_USUAL_TILE_INSTANCES(Commit, float, 128)
SPECDEC_USUAL_TILE_INSTANCES(Commit, float, 192)
SPECDEC_USUAL_TILE_INSTANCES(Commit, float, 256)
SPECDEC_TALL_TILE_INSTANCES(Commit, float, 64)
SPECDEC_TALL_TILE_INSTANCES(Commit, float, 128)
SPECDEC_INSTANCE(Commit, Tile<false, float, 256, kTall>)

}  // namespace specdec::cuda
