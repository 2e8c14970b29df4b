#include "conv_commit.cuh"
#include "conv_verify.cuh"
#include "launch.cuh"

namespace specdec::cuda {
SPECDEC_INSTANCE(ConvVerify, ConvTraits<float, float, 4, true>)
SPECDEC_INSTANCE(ConvVerify, ConvTraits<float, float, 0, true>)
SPECDEC_INSTANCE(ConvVerify, ConvTraits<float, float, 0, false>)
SPECDEC_INSTANCE(ConvCommit, ConvTraits<float, float, 0, true>)
SPECDEC_INSTANCE(ConvCommit, ConvTraits<float, float, 0, false>)
}  // namespace specdec::cuda
