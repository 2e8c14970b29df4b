#include "instances.cuh"
#include "launch.cuh"
#include "verify_serial.cuh"

namespace specdec::cuda {

SPECDEC_USUAL_TILE_INSTANCES(VerifySerial, bfloat16, 32)
SPECDEC_USUAL_TILE_INSTANCES(VerifySerial, bfloat16, 64)
SPECDEC_USUAL_TILE_INSTANCES(VerifySerial, bfloat16, 96)
SPECDEC_USUAL_TILE_INSTANCES(VerifySerial, bfloat16, 128)
SPECDEC_USUAL_TILE_INSTANCES(VerifySerial, bfloat16, 192)
SPECDEC_USUAL_TILE_INSTANCES(VerifySerial, bfloat16, 256)
SPECDEC_TALL_TILE_INSTANCES(VerifySerial, bfloat16, 64)
SPECDEC_TALL_TILE_INSTANCES(VerifySerial, bfloat16, 128)
SPECDEC_INSTANCE(VerifySerial, Tile<false, bfloat16, 256, kTall>)
SPECDEC_NARROW_TILE_INSTANCES(VerifySerial, bfloat16, 256)

}  // namespace specdec::cuda
