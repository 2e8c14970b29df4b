// Bindings of the short convolution: conv_verify, conv_verify_deferred, conv_commit.
#include "../cpu/ops.h"
#include "conv_args.h"

namespace specdec::binding {

namespace {

Tensor run(ConvVerifyParams& p, const Tensor& x) {
  Tensor y = new_contiguous({p.B, p.N, p.C}, aoti_dtype(x));
  p.y = y.mutable_data_ptr();
  check_status(cpu::conv_verify(p), "conv_verify");
  return y;
}

Tensor conv_verify(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                   const Tensor& conv_state, const OptionalTensor& slots, const OptionalTensor& parents,
                   const OptionalTensor& lengths, const OptionalTensor& prefix_x,
                   const OptionalTensor& prefix_parents, int64_t activation) {
  ConvVerifyParams p;
  fill_convolution(p, x, weight, bias, conv_state, activation, Access::kRead);
  p.has_prefix = prefix_x.has_value();
  if (p.has_prefix) {
    p.prefix = conv_input(*prefix_x, "prefix.x", p.B, p.C);
    check_dtype(*prefix_x, "prefix.x", x.scalar_type());
  }
  const Rows rows = fill_tree(p, "conv_state", slots, parents, lengths, p.prefix.nodes);
  if (p.has_prefix) {
    p.prefix_parents = parents_view(prefix_parents, "prefix.parents", rows, p.prefix.nodes, 0, nullptr);
  }
  return run(p, x);
}

Tensor conv_verify_deferred(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                            const Tensor& conv_state, const OptionalTensor& slots,
                            const OptionalTensor& parents, const OptionalTensor& lengths,
                            const Tensor& pending_x, const OptionalTensor& pending_path,
                            const OptionalTensor& pending_path_lengths, int64_t activation) {
  ConvVerifyParams p;
  fill_convolution(p, x, weight, bias, conv_state, activation, Access::kWrite);
  p.pending = conv_input(pending_x, "pending.x", p.B, p.C);
  check_dtype(pending_x, "pending.x", x.scalar_type());
  const Rows rows = fill_tree(p, "conv_state", slots, parents, lengths, 0);
  fill_pending_path(p, rows, pending_path, pending_path_lengths);
  check_apart(conv_state, "conv_state",
              {{"x", x},
               {"weight", weight},
               {"bias", bias},
               {"slots", slots},
               {"parents", parents},
               {"lengths", lengths},
               {"pending.x", pending_x},
               {"pending.path", pending_path},
               {"pending.path_lengths", pending_path_lengths}});
  return run(p, x);
}

void conv_commit(const Tensor& conv_state, const Tensor& x, const OptionalTensor& path,
                 const OptionalTensor& path_lengths, const OptionalTensor& slots) {
  ConvCommitParams p;
  p.x = conv_input(x, "x", -1, -1);
  p.B = x.size(0);
  p.C = x.size(2);
  p.state = conv_state_view(conv_state, -1, p.C, p.x.dtype, Access::kWrite);
  p.W = conv_state.size(1) + 1;
  const Rows rows = slots_view(slots, p.B, p.state.slots, "conv_state");
  p.slots = rows.slots;
  p.path = path_view(path, path_lengths, "path", "path_lengths", rows, p.x.nodes);
  check_apart(conv_state, "conv_state",
              {{"x", x}, {"path", path}, {"path_lengths", path_lengths}, {"slots", slots}});
  check_status(cpu::conv_commit(p), "conv_commit");
}

}  // namespace

}  // namespace specdec::binding

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("conv_verify", TORCH_BOX(&specdec::binding::conv_verify));
  m.impl("conv_verify_deferred", TORCH_BOX(&specdec::binding::conv_verify_deferred));
  m.impl("conv_commit", TORCH_BOX(&specdec::binding::conv_commit));
}
