// Bindings of the short convolution: conv_verify, conv_verify_deferred, conv_commit.
#include "backend.h"
#include "views.h"

namespace specdec::binding {

namespace {

// Raw inputs [B, N, C] with free row and node strides; B or C of -1 is any.
ConvInputView conv_input(const Tensor& x, const char* name, int64_t B, int64_t C) {
  check_shape(x, name, {B, -1, C}, "[B, N, C]");
  STD_TORCH_CHECK(x.size(2) >= 1, name, ": got no channels, want C of at least 1");
  check_last_contiguous(x, name);
  return {x.const_data_ptr(), float_dtype(x, name), x.size(1), x.stride(0), x.stride(1)};
}

// The window pool [S, W-1, C], in the dtype of x or float32.
ConvStateView conv_state_view(const Tensor& state, int64_t window, int64_t C, DType x_dtype, Access access) {
  check_shape(state, "conv_state", {-1, window, C}, "[S, W-1, C]");
  check_pool(state, "conv_state", access);
  const DType dtype = float_dtype(state, "conv_state");
  STD_TORCH_CHECK(dtype == x_dtype || dtype == DType::kFloat32, "conv_state: got dtype ",
                  torch::headeronly::toString(state.scalar_type()), ", want the dtype of x or float32");
  return {pool_data(state, access), dtype, state.size(0), state.stride(0)};
}

// What both forms of the verification share, but for the tree.
void fill(ConvVerifyParams& p, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
          const Tensor& conv_state, int64_t activation, Access access) {
  p.x = conv_input(x, "x", -1, -1);
  p.B = x.size(0);
  p.N = x.size(1);
  p.C = x.size(2);
  check_dtype(weight, "weight", ScalarType::Float);
  check_shape(weight, "weight", {p.C, -1}, "[C, W]");
  check_contiguous(weight, "weight");
  p.W = weight.size(1);
  STD_TORCH_CHECK(p.W >= 1 && p.W <= kMaxConvWidth, "weight: got W = ", p.W, ", want 1 to ", kMaxConvWidth);
  p.weight = static_cast<const float*>(weight.const_data_ptr());
  if (bias.has_value()) {
    check_dtype(*bias, "bias", ScalarType::Float);
    check_shape(*bias, "bias", {p.C}, "[C]");
    check_contiguous(*bias, "bias");
    p.bias = static_cast<const float*>(bias->const_data_ptr());
  }
  STD_TORCH_CHECK(activation == 0 || activation == 1, "activation: got ", activation,
                  ", want 0 (none) or 1 (silu)");
  p.activation = static_cast<Activation>(activation);
  p.state = conv_state_view(conv_state, p.W - 1, p.C, p.x.dtype, access);
}

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
  const Operands operands{{"conv_state", conv_state}, Access::kRead, inputs};
  const Device device = device_of(operands);
  ConvVerifyParams p;
  fill(p, x, weight, bias, conv_state, activation, Access::kRead);
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
  const Operands operands{{"conv_state", conv_state}, Access::kWrite, inputs};
  const Device device = device_of(operands);
  ConvVerifyParams p;
  fill(p, x, weight, bias, conv_state, activation, Access::kWrite);
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
  const Operands operands{{"conv_state", conv_state}, Access::kWrite, inputs};
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
