// Checked arguments of the short convolution: inputs, window, taps.
#pragma once

#include "views.h"

namespace specdec::binding {

// Raw inputs [B, N, C] with free row and node strides; B or C of -1 is any.
inline ConvInputView conv_input(const Tensor& x, const char* name, int64_t B, int64_t C) {
  check_shape(x, name, {B, -1, C}, "[B, N, C]");
  STD_TORCH_CHECK(x.size(2) >= 1, name, ": got no channels, want C of at least 1");
  check_last_contiguous(x, name);
  return {x.const_data_ptr(), float_dtype(x, name), x.size(1), x.stride(0), x.stride(1)};
}

// The window pool [S, W-1, C], in the dtype of x or float32.
inline ConvStateView conv_state_view(const Tensor& state, int64_t window, int64_t C, DType x_dtype,
                                     Access access, const char* x_name = "x") {
  check_shape(state, "conv_state", {-1, window, C}, "[S, W-1, C]");
  check_pool(state, "conv_state", access);
  const DType dtype = float_dtype(state, "conv_state");
  STD_TORCH_CHECK(dtype == x_dtype || dtype == DType::kFloat32, "conv_state: got dtype ",
                  torch::headeronly::toString(state.scalar_type()), ", want the dtype of ", x_name,
                  " or float32");
  return {pool_data(state, access), dtype, state.size(0), state.stride(0)};
}

// Names of a convolution's arguments in error messages.
struct ConvNames {
  const char *x = "x", *weight = "weight", *bias = "bias";
};

// What both forms of the verification share, but for the tree.
inline void fill_convolution(ConvVerifyParams& p, const Tensor& x, const Tensor& weight,
                             const OptionalTensor& bias, const Tensor& conv_state, int64_t activation,
                             Access access, const ConvNames& names = {}) {
  p.x = conv_input(x, names.x, -1, -1);
  p.B = x.size(0);
  p.N = x.size(1);
  p.C = x.size(2);
  check_dtype(weight, names.weight, ScalarType::Float);
  check_shape(weight, names.weight, {p.C, -1}, "[C, W]");
  check_contiguous(weight, names.weight);
  p.W = weight.size(1);
  STD_TORCH_CHECK(p.W >= 1 && p.W <= kMaxConvWidth, names.weight, ": got W = ", p.W, ", want 1 to ",
                  kMaxConvWidth);
  p.weight = static_cast<const float*>(weight.const_data_ptr());
  if (bias.has_value()) p.bias = float_vector(*bias, names.bias, p.C, "[C]");
  STD_TORCH_CHECK(activation == 0 || activation == 1, "activation: got ", activation,
                  ", want 0 (none) or 1 (silu)");
  p.activation = static_cast<Activation>(activation);
  p.state = conv_state_view(conv_state, p.W - 1, p.C, p.x.dtype, access, names.x);
}

}  // namespace specdec::binding
