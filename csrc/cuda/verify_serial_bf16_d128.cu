#include "instances.cuh"
#include "launch.cuh"
#include "verify_serial.cuh"

namespace specdec::cuda {

SPECDEC_TILE_INSTANCES(VerifySerial, bfloat16, 128)

}  // namespace specdec::cuda
