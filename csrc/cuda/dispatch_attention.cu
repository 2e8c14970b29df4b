// Which instances of the kernels of attention exist, and which ones a call takes.
#include "ops.h"
#include "tree_attention.cuh"

namespace specdec::cuda {

namespace {

using Any = TreeAttention<AttentionTraits<float, 0>>;  // for what the instances have in common

int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

bool aligned(const void* data, const Strides& s, int64_t size) {
  const auto bytes = static_cast<uintptr_t>((s.b | s.n | s.h) * size);
  return (reinterpret_cast<uintptr_t>(data) | bytes) % 16 == 0;
}

bool aligned(const TreeAttentionParams& p) {
  const int64_t size = size_of(p.dtype);
  return aligned(p.q, p.q_stride, size) && aligned(p.nodes.k, p.nodes.k_stride, size) &&
         aligned(p.nodes.v, p.nodes.v_stride, size) && aligned(p.cache.k, p.cache.k_stride, size) &&
         aligned(p.cache.v, p.cache.v_stride, size) &&
         (p.prefix.nodes == 0 ||
          (aligned(p.prefix.k, p.prefix.k_stride, size) && aligned(p.prefix.v, p.prefix.v_stride, size)));
}

// Blocks of keys that a sequence may have: where committed lengths are on the device, all there is room for.
int64_t blocks_of(const TreeAttentionParams& p) {
  return (p.cache.room + p.prefix.nodes + p.N + Any::kKeys - 1) / Any::kKeys;
}

template <typename T>
Status run(const AttentionWork& work, Stream stream) {
  const Status status = work.op.D == 64    ? launch<TreeAttention<AttentionTraits<T, 64>>>(work, stream)
                        : work.op.D == 128 ? launch<TreeAttention<AttentionTraits<T, 128>>>(work, stream)
                                           : launch<TreeAttention<AttentionTraits<T, 0>>>(work, stream);
  if (status != Status::kOk || work.blocks == 1) return status;
  return launch<CombineAnswers<T>>(work, stream);
}

}  // namespace

int64_t tree_attention_workspace_bytes(const TreeAttentionParams& p) {
  const int64_t blocks = blocks_of(p);
  return blocks <= 1 ? 0 : p.B * p.N * p.HQ * blocks * (kAnswerHead + p.D) * 4;
}

Status tree_attention(const TreeAttentionParams& p, Workspace workspace, Stream stream) {
  if (p.D < 1 || p.D > kMaxAttentionWidth || p.D % kAttentionMultiple != 0) return Status::kUnsupported;
  if (p.N + p.prefix.nodes > kMaxAttentionNodes) return Status::kUnsupported;
  if (p.HK < 1 || p.HQ % p.HK != 0) return Status::kInvalidArgument;
  if (workspace.bytes < tree_attention_workspace_bytes(p)) return Status::kInvalidArgument;
  if (p.B * p.N == 0) return Status::kOk;
  const int64_t chunks = (p.N * (p.HQ / p.HK) + Any::kRows - 1) / Any::kRows;
  if (p.cache.room > INT32_MAX / 2 || p.B * p.N * p.HQ > INT32_MAX) return Status::kUnsupported;
  const AttentionWork work{p, static_cast<float*>(workspace.data), static_cast<int32_t>(blocks_of(p)),
                           static_cast<int32_t>(chunks), aligned(p)};
  switch (p.dtype) {
    case DType::kFloat32:
      return run<float>(work, stream);
    case DType::kBFloat16:
      return run<bfloat16>(work, stream);
    case DType::kFloat16:
      return run<half>(work, stream);
  }
  return Status::kUnsupported;
}

}  // namespace specdec::cuda
