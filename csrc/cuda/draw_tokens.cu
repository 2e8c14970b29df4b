#include "draw_tokens.cuh"
#include "launch.cuh"

namespace specdec::cuda {

SPECDEC_INSTANCE(DrawTokens, true)
SPECDEC_INSTANCE(DrawTokens, false)

}  // namespace specdec::cuda
