#include "launch.cuh"
#include "tree_attention.cuh"

namespace specdec::cuda {
SPECDEC_INSTANCE(TreeAttention, AttentionTraits<half, 64>)
SPECDEC_INSTANCE(TreeAttention, AttentionTraits<half, 128>)
SPECDEC_INSTANCE(TreeAttention, AttentionTraits<half, 0>)
SPECDEC_INSTANCE(CombineAnswers, half)
}  // namespace specdec::cuda
