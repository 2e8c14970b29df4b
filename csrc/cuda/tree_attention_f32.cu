#include "launch.cuh"
#include "tree_attention.cuh"

namespace specdec::cuda {
SPECDEC_INSTANCE(TreeAttention, AttentionTraits<float, 64>)
SPECDEC_INSTANCE(TreeAttention, AttentionTraits<float, 128>)
SPECDEC_INSTANCE(TreeAttention, AttentionTraits<float, 0>)
SPECDEC_INSTANCE(CombineAnswers, float)
}  // namespace specdec::cuda
