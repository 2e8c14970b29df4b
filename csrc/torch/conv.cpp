// Bindings of the short convolution: conv_verify, conv_verify_deferred, conv_commit.
#include "backend.h"
#include "conv_args.h"

namespace specdec::binding {

namespace {

Tensor finish(ConvVerifyParams& p, const Operands& operands, const Device& device, const Tensor& x) {
  Tensor y = new_contiguous(device, {p.B, p.N, p.C}, aoti_dtype(x));
  p.y = y.mutable_data_ptr();
  const Named outputs[] = {{"y", y}};
  check_status(run(p, operands, outputs), "conv_verify");
  return y;
}

Tensor conv_verify(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                   const Tensor& conv_state, const OptionalTensor& slots, const OptionalTensor& parents,
                   const OptionalTensor& lengths, const OptionalTensor& prefix_x,
                   const OptionalTensor& prefix_parents, int64_t activation) {
  const Named inputs[] = {{"x", x},
                          {"weight", weight},
                          {"bias", bias},
                          {"slots", slots},
                          {"parents", parents},
                          {"lengths", lengths},
                          {"prefix.x", prefix_x},
                          {"prefix.parents", prefix_parents}};
  const Operands operands{{{"conv_state", conv_state}}, Access::kRead, inputs};
  const Device device = device_of(operands);
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
  return finish(p, operands, device, x);
}

Tensor conv_verify_deferred(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                            const Tensor& conv_state, const OptionalTensor& slots,
                            const OptionalTensor& parents, const OptionalTensor& lengths,
                            const Tensor& pending_x, const OptionalTensor& pending_path,
                            const OptionalTensor& pending_path_lengths, int64_t activation) {
  const Named inputs[] = {{"x", x},
                          {"weight", weight},
                          {"bias", bias},
                          {"slots", slots},
                          {"parents", parents},
                          {"lengths", lengths},
                          {"pending.x", pending_x},
                          {"pending.path", pending_path},
                          {"pending.path_lengths", pending_path_lengths}};
  const Operands operands{{{"conv_state", conv_state}}, Access::kWrite, inputs};
  const Device device = device_of(operands);
  ConvVerifyParams p;
  fill_convolution(p, x, weight, bias, conv_state, activation, Access::kWrite);
  p.pending = conv_input(pending_x, "pending.x", p.B, p.C);
  check_dtype(pending_x, "pending.x", x.scalar_type());
  const Rows rows = fill_tree(p, "conv_state", slots, parents, lengths, 0);
  fill_pending_path(p, rows, pending_path, pending_path_lengths);
  check_apart(operands);
  return finish(p, operands, device, x);
}

void conv_commit(const Tensor& conv_state, const Tensor& x, const OptionalTensor& path,
                 const OptionalTensor& path_lengths, const OptionalTensor& slots) {
  const Named inputs[] = {{"x", x}, {"path", path}, {"path_lengths", path_lengths}, {"slots", slots}};
  const Operands operands{{{"conv_state", conv_state}}, Access::kWrite, inputs};
  device_of(operands);
  ConvCommitParams p;
  p.x = conv_input(x, "x", -1, -1);
  p.B = x.size(0);
  p.C = x.size(2);
  p.state = conv_state_view(conv_state, -1, p.C, p.x.dtype, Access::kWrite);
  p.W = conv_state.size(1) + 1;
  const Rows rows = slots_view(slots, p.B, p.state.slots, "conv_state");
  p.slots = rows.slots;
  p.path = path_view(path, path_lengths, "path", "path_lengths", rows, p.x.nodes);
  check_apart(operands);
  check_status(run(p, operands), "conv_commit");
}

}  // namespace

}  // namespace specdec::binding

SPECDEC_OPERATORS(m) {
  m.impl("conv_verify", TORCH_BOX(&specdec::binding::conv_verify));
  m.impl("conv_verify_deferred", TORCH_BOX(&specdec::binding::conv_verify_deferred));
  m.impl("conv_commit", TORCH_BOX(&specdec::binding::conv_commit));
}
