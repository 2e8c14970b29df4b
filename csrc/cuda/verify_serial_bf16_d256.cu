#include "instances.cuh"
#include "launch.cuh"
#include "verify_serial.cuh"

namespace specdec::cuda {

SPECDEC_TILE_INSTANCES(VerifySerial, bfloat16, 256)
SPECDEC_NARROW_TILE_INSTANCES(VerifySerial, bfloat16, 256)

}  // namespace specdec::cuda
