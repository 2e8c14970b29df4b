// conv_verify: a short causal convolution over a chain or a tree. A node reads its own raw input and those of
// its W-1 nearest ancestors, continued into the prefix and then into the committed window.
#include "conv_tile.h"
#include "conv_window.h"
#include "parallel.h"

namespace specdec::cpu::SPECDEC_ISA {

namespace {

template <typename X, typename S>
Status run(const ConvVerifyParams& p) {
  if (p.has_pending && p.W > 1) {
    parallel_for(p.B, p.B * p.W * p.C, [&](int64_t b) {
      if (slot_of(p.slots, b) < 0) return;
      S* window = static_cast<S*>(p.state.data) + slot_of(p.slots, b) * p.state.slot_stride;
      advance_window<X, S>(window, p.pending, p.pending_path, b, p.C, p.W);
    });
  }
  const int64_t tiles = (p.C + conv::kTile - 1) / conv::kTile;
  parallel_for(p.B * tiles, p.B * p.N * p.C * p.W, [&](int64_t item) {
    const int64_t b = item / tiles;
    const int64_t begin = item % tiles * conv::kTile;
    const int64_t count = std::min(conv::kTile, p.C - begin);
    const int64_t slot = slot_of(p.slots, b);
    const int64_t length = slot < 0 ? 0 : valid_length(p.lengths, b, p.N);
    X* y = static_cast<X*>(p.y) + b * p.N * p.C + begin;
    if (length > 0) convolve<X, S>(p, b, slot, 0, length, begin, count, y, p.C);
    for (int64_t n = length; n < p.N; ++n) std::memset(y + n * p.C, 0, count * sizeof(X));
  });
  return Status::kOk;
}

}  // namespace

Status conv_verify(const ConvVerifyParams& p) {
  if (p.W < 1 || p.W > kMaxConvWidth) return Status::kUnsupported;
  if (p.has_pending && (p.has_prefix || p.pending.dtype != p.x.dtype)) return Status::kInvalidArgument;
  if (p.has_prefix && p.prefix.dtype != p.x.dtype) return Status::kInvalidArgument;
  return visit_dtype(p.x.dtype, [&](auto x_tag) {
    using X = decltype(x_tag);
    if (p.state.dtype == DType::kFloat32) return run<X, float>(p);
    if (p.state.dtype == p.x.dtype) return run<X, X>(p);
    return Status::kUnsupported;
  });
}

}  // namespace specdec::cpu::SPECDEC_ISA
