#include "accept_greedy.cuh"
#include "accept_sampled.cuh"
#include "launch.cuh"

namespace specdec::cuda {

SPECDEC_INSTANCE(GreedyParts, float, true)
SPECDEC_INSTANCE(GreedyParts, float, false)
SPECDEC_INSTANCE(GreedyParts, bfloat16, true)
SPECDEC_INSTANCE(GreedyParts, bfloat16, false)
SPECDEC_INSTANCE(GreedyParts, half, true)
SPECDEC_INSTANCE(GreedyParts, half, false)
template Status launch<GreedyWalk>(const GreedyWalk::Params&, Stream);

SPECDEC_INSTANCE(SampledSums, true, true)
SPECDEC_INSTANCE(SampledSums, true, false)
SPECDEC_INSTANCE(SampledSums, false, true)
SPECDEC_INSTANCE(SampledSums, false, false)
SPECDEC_INSTANCE(SampledDraw, true, true)
SPECDEC_INSTANCE(SampledDraw, true, false)
SPECDEC_INSTANCE(SampledDraw, false, true)
SPECDEC_INSTANCE(SampledDraw, false, false)
template Status launch<SampledWalk>(const SampledWalk::Params&, Stream);

}  // namespace specdec::cuda
