// Bindings of the short convolution: conv_verify, conv_commit.
#include "../cpu/ops.h"
#include "tensor_args.h"

namespace specdec::binding {

namespace {

ConvInputView conv_input(const Tensor& x, const char* name) {
  check_last_contiguous(x, name);
  return {x.const_data_ptr(), float_dtype(x, name), x.size(1), x.stride(0), x.stride(1)};
}

ConvStateView conv_state_view(const Tensor& state, int64_t C) {
  check_shape(state, "conv_state", {-1, -1, C}, "[S, W-1, C]");
  STD_TORCH_CHECK(state.size(0) == 0 || state.size(1) == 0 || (state.stride(2) == 1 && state.stride(1) == C),
                  "conv_state: got strides that are not ",
                  "contiguous within a slot, want [W-1, C] contiguous");
  return {state.mutable_data_ptr(), float_dtype(state, "conv_state"), state.size(0), state.stride(0)};
}

// path [B, P] and path_lengths [B] into `nodes` nodes; node indices are checked because they address memory.
PathView path_view(const OptionalTensor& path, const OptionalTensor& lengths, int64_t B, int64_t nodes) {
  PathView view;
  view.path = int32_or_null(path, "path", {B, -1}, "[B, P]");
  view.max_length = path.has_value() ? path->size(1) : nodes;
  view.lengths = int32_or_null(lengths, "path_lengths", {B}, "[B]");
  if (view.path == nullptr) return view;
  for (int64_t b = 0; b < B; ++b) {
    const int64_t length =
        view.lengths == nullptr ? view.max_length : std::clamp<int64_t>(view.lengths[b], 0, view.max_length);
    for (int64_t i = 0; i < length; ++i) {
      const int32_t node = view.path[b * view.max_length + i];
      STD_TORCH_CHECK(node >= 0 && node < nodes, "path: row ", b, " entry ", i, " is ", node,
                      ", want a node in [0, ", nodes, ")");
    }
  }
  return view;
}

void conv_commit(const Tensor& conv_state, const Tensor& x, const OptionalTensor& path,
                 const OptionalTensor& path_lengths, const OptionalTensor& slots) {
  check_shape(x, "x", {-1, -1, -1}, "[B, N, C]");
  ConvCommitParams p;
  p.B = x.size(0);
  p.C = x.size(2);
  p.W = conv_state.dim() == 3 ? conv_state.size(1) + 1 : 0;
  p.x = conv_input(x, "x");
  p.path = path_view(path, path_lengths, p.B, x.size(1));
  p.state = conv_state_view(conv_state, p.C);
  p.slots = int32_or_null(slots, "slots", {p.B}, "[B]");
  check_slots(p.slots, p.B, p.state.slots);
  check_status(cpu::conv_commit(p), "conv_commit");
}

}  // namespace

}  // namespace specdec::binding

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("conv_commit", TORCH_BOX(&specdec::binding::conv_commit));
}
