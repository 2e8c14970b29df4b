#include "instances.cuh"
#include "launch.cuh"
#include "verify_serial.cuh"

namespace specdec::cuda {

SPECDEC_USUAL_TILE_INSTANCES(VerifySerial, float, 32)
SPECDEC_USUAL_TILE_INSTANCES(VerifySerial, float, 64)
SPECDEC_USUAL_TILE_INSTANCES(VerifySerial, float, 96)
SPECDEC_USUAL_TILE_INSTANCES(VerifySerial, float, 128)
SPECDEC_USUAL_TILE_INSTANCES(VerifySerial, float, 192)
SPECDEC_USUAL_TILE_INSTANCES(VerifySerial, float, 256)
SPECDEC_TALL_TILE_INSTANCES(VerifySerial, float, 64)
SPECDEC_TALL_TILE_INSTANCES(VerifySerial, float, 128)
SPECDEC_INSTANCE(VerifySerial, Tile<false, float, 256, kTall>)
SPECDEC_NARROW_TILE_INSTANCES(VerifySerial, float, 256)

}  // namespace specdec::cuda
