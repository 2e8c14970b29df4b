#include "instances.cuh"
#include "launch.cuh"
#include "verify_layer.cuh"

namespace specdec::cuda {

SPECDEC_INSTANCE(VerifyLayer, Tile<false, float, 64, kUsual>)
SPECDEC_INSTANCE(VerifyLayer, Tile<false, float, 64, kTall>)
SPECDEC_INSTANCE(VerifyLayer, Tile<false, float, 128, kUsual>)
SPECDEC_INSTANCE(VerifyLayer, Tile<false, float, 128, kTall>)
SPECDEC_INSTANCE(VerifyLayer, Tile<false, float, 256, kUsual>)
SPECDEC_INSTANCE(VerifyLayer, Tile<false, float, 256, kTall>)

}  // namespace specdec::cuda
