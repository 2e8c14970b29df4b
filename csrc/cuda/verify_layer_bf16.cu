#include "instances.cuh"
#include "launch.cuh"
#include "verify_layer.cuh"

namespace specdec::cuda {

SPECDEC_INSTANCE(VerifyLayer, Tile<false, bfloat16, 64, kUsual>)
SPECDEC_INSTANCE(VerifyLayer, Tile<false, bfloat16, 64, kTall>)
SPECDEC_INSTANCE(VerifyLayer, Tile<false, bfloat16, 128, kUsual>)
SPECDEC_INSTANCE(VerifyLayer, Tile<false, bfloat16, 128, kTall>)
SPECDEC_INSTANCE(VerifyLayer, Tile<false, bfloat16, 256, kUsual>)
SPECDEC_INSTANCE(VerifyLayer, Tile<false, bfloat16, 256, kTall>)

}  // namespace specdec::cuda
