#include "conv_commit.cuh"
#include "conv_verify.cuh"
#include "launch.cuh"

namespace specdec::cuda {
SPECDEC_INSTANCE(ConvVerify, ConvTraits<half, half, 4, true>)
SPECDEC_INSTANCE(ConvVerify, ConvTraits<half, half, 0, true>)
SPECDEC_INSTANCE(ConvVerify, ConvTraits<half, half, 0, false>)
SPECDEC_INSTANCE(ConvCommit, ConvTraits<half, half, 0, true>)
SPECDEC_INSTANCE(ConvCommit, ConvTraits<half, half, 0, false>)
SPECDEC_INSTANCE(ConvVerify, ConvTraits<half, float, 4, true>)
SPECDEC_INSTANCE(ConvVerify, ConvTraits<half, float, 0, true>)
SPECDEC_INSTANCE(ConvVerify, ConvTraits<half, float, 0, false>)
SPECDEC_INSTANCE(ConvCommit, ConvTraits<half, float, 0, true>)
SPECDEC_INSTANCE(ConvCommit, ConvTraits<half, float, 0, false>)
}  // namespace specdec::cuda
