// Which instances of the convolution's kernels exist, and which one a call takes.
#include "conv_commit.cuh"
#include "conv_verify.cuh"
#include "ops.h"

namespace specdec::cuda {

namespace {

// Rows that begin at multiples of 16 bytes. Strides count elements of `size` bytes.
bool aligned(const void* data, int64_t size, int64_t stride_a = 0, int64_t stride_b = 0) {
  return (reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(stride_a * size) |
          static_cast<uintptr_t>(stride_b * size)) %
             16 ==
         0;
}

int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

bool aligned(const ConvInputView& x) { return aligned(x.x, size_of(x.dtype), x.stride_b, x.stride_n); }
bool aligned(const ConvStateView& state, int64_t C) {
  return aligned(state.data, size_of(state.dtype), state.slot_stride, C);
}

template <template <typename> typename Kernel, typename X, typename S, int kWidth, typename Params>
Status run_width(const Params& p, bool vector, Stream stream) {
  return vector ? launch<Kernel<ConvTraits<X, S, kWidth, true>>>(p, stream)
                : launch<Kernel<ConvTraits<X, S, 0, false>>>(p, stream);
}

template <template <typename> typename Kernel, int kWidth, typename X, typename Params>
Status run_state(const Params& p, DType x, bool vector, Stream stream) {
  if (p.state.dtype == DType::kFloat32) return run_width<Kernel, X, float, kWidth>(p, vector, stream);
  return p.state.dtype == x ? run_width<Kernel, X, X, kWidth>(p, vector, stream) : Status::kUnsupported;
}

template <template <typename> typename Kernel, int kWidth, typename Params>
Status run(const Params& p, DType x, bool vector, Stream stream) {
  switch (x) {
    case DType::kFloat32:
      return run_state<Kernel, kWidth, float>(p, x, vector, stream);
    case DType::kBFloat16:
      return run_state<Kernel, kWidth, bfloat16>(p, x, vector, stream);
    case DType::kFloat16:
      return run_state<Kernel, kWidth, half>(p, x, vector, stream);
  }
  return Status::kUnsupported;
}

}  // namespace

Status conv_verify(const ConvVerifyParams& p, Stream stream) {
  if (p.W < 1 || p.W > kMaxConvWidth) return Status::kUnsupported;
  if (p.has_pending && (p.has_prefix || p.pending.dtype != p.x.dtype)) return Status::kInvalidArgument;
  if (p.has_prefix && p.prefix.dtype != p.x.dtype) return Status::kInvalidArgument;
  const int64_t prefix = p.has_prefix ? p.prefix.nodes : 0;
  const bool tree = p.parents != nullptr || (prefix > 0 && p.prefix_parents != nullptr);
  if (tree && prefix + p.N > kMaxConvTreeNodes) return Status::kUnsupported;
  if (prefix > INT32_MAX / 2 || p.N > INT32_MAX / 2) return Status::kUnsupported;
  const bool vector = p.C * size_of(p.x.dtype) % 16 == 0 && aligned(p.x) &&
                      (!p.has_prefix || aligned(p.prefix)) && (!p.has_pending || aligned(p.pending)) &&
                      aligned(p.state, p.C) && aligned(p.weight, 4) && aligned(p.y, 1);
  return p.W == 4 ? run<ConvVerify, 4>(p, p.x.dtype, vector, stream)
                  : run<ConvVerify, 0>(p, p.x.dtype, vector, stream);
}

Status conv_commit(const ConvCommitParams& p, Stream stream) {
  if (p.W < 2) return Status::kOk;  // width 1 has no memory
  const bool vector = p.C * size_of(p.state.dtype) % 16 == 0 && aligned(p.x) && aligned(p.state, p.C);
  return run<ConvCommit, 0>(p, p.x.dtype, vector, stream);
}

}  // namespace specdec::cuda
