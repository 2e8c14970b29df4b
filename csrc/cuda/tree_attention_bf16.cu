#include "launch.cuh"
#include "tree_attention.cuh"

namespace specdec::cuda {
SPECDEC_INSTANCE(TreeAttention, AttentionTraits<bfloat16, 64>)
SPECDEC_INSTANCE(TreeAttention, AttentionTraits<bfloat16, 128>)
SPECDEC_INSTANCE(TreeAttention, AttentionTraits<bfloat16, 0>)
SPECDEC_INSTANCE(CombineAnswers, bfloat16)
}  // namespace specdec::cuda
