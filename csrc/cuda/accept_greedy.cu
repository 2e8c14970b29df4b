#include "accept_greedy.cuh"
#include "launch.cuh"

namespace specdec::cuda {

SPECDEC_INSTANCE(GreedyParts, float, true)
SPECDEC_INSTANCE(GreedyParts, float, false)
SPECDEC_INSTANCE(GreedyParts, bfloat16, true)
SPECDEC_INSTANCE(GreedyParts, bfloat16, false)
SPECDEC_INSTANCE(GreedyParts, half, true)
SPECDEC_INSTANCE(GreedyParts, half, false)
template Status launch<GreedyWalk>(const GreedyWalk::Params&, Stream);

}  // namespace specdec::cuda
