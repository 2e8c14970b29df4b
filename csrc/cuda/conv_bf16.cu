#include "conv_commit.cuh"
#include "conv_verify.cuh"
#include "launch.cuh"

namespace specdec::cuda {
SPECDEC_INSTANCE(ConvVerify, ConvTraits<bfloat16, bfloat16, 4, true>)
SPECDEC_INSTANCE(ConvVerify, ConvTraits<bfloat16, bfloat16, 0, true>)
SPECDEC_INSTANCE(ConvVerify, ConvTraits<bfloat16, bfloat16, 0, false>)
SPECDEC_INSTANCE(ConvCommit, ConvTraits<bfloat16, bfloat16, 0, true>)
SPECDEC_INSTANCE(ConvCommit, ConvTraits<bfloat16, bfloat16, 0, false>)
SPECDEC_INSTANCE(ConvVerify, ConvTraits<bfloat16, float, 4, true>)
SPECDEC_INSTANCE(ConvVerify, ConvTraits<bfloat16, float, 0, true>)
SPECDEC_INSTANCE(ConvVerify, ConvTraits<bfloat16, float, 0, false>)
SPECDEC_INSTANCE(ConvCommit, ConvTraits<bfloat16, float, 0, true>)
SPECDEC_INSTANCE(ConvCommit, ConvTraits<bfloat16, float, 0, false>)
}  // namespace specdec::cuda
