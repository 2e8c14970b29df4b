// Bindings of the dense ops: linear, rms_norm, swiglu, gated_delta_gates, rotate_heads.
#include "dense.h"

#include "../cpu/ops.h"

namespace specdec::binding {

namespace {

// A fresh tensor of x's shape with another last dimension.
Tensor new_output(const Tensor& x, int64_t last, int32_t dtype) {
  const int64_t dim = x.dim();
  STD_TORCH_CHECK(dim <= kMaxDims, "x: got ", dim, " dimensions, want at most ", kMaxDims);
  int64_t sizes[kMaxDims];
  for (int64_t i = 0; i + 1 < dim; ++i) sizes[i] = x.size(i);
  sizes[dim - 1] = last;
  return new_contiguous(Device{}, sizes, dim, dtype);
}

// Rows [rows, width] of x as one stride over the second to last dimension and one over all before it. A
// tensor without such strides is copied: `x` then becomes the copy, which the caller keeps alive.
RowsView rows_view(Tensor& x, const char* name, int64_t width) {
  check_given(x, name);
  const int64_t dim = x.dim();
  STD_TORCH_CHECK(dim >= 1 && x.size(dim - 1) == width, name, ": got shape ", shape_string(x),
                  ", want a last dimension of ", width);
  RowsView view;
  view.dtype = float_dtype(x, name);
  bool strided = width <= 1 || x.stride(dim - 1) == 1;
  view.rows = 1;
  for (int64_t i = 0; i + 1 < dim; ++i) view.rows *= x.size(i);
  int64_t span = 0;  // stride of the dimensions before `inner`, merged so far
  int64_t size = 1;
  for (int64_t i = dim - 3; i >= 0; --i) {
    if (x.size(i) == 1) continue;
    if (size == 1) {
      span = x.stride(i);
    } else {
      strided = strided && x.stride(i) == span * size;
    }
    size *= x.size(i);
  }
  if (!strided && view.rows > 0) {
    x = torch::stable::contiguous(x);
    return rows_view(x, name, width);
  }
  view.data = x.const_data_ptr();
  if (dim >= 2) {
    view.inner = std::max<int64_t>(1, x.size(dim - 2));
    view.stride_inner = x.stride(dim - 2);
  }
  view.stride_outer = span;
  return view;
}

// The last dimension of x, which the rows of a row-wise op lie on.
int64_t last_size(const Tensor& x, const char* name) {
  check_given(x, name);
  STD_TORCH_CHECK(x.dim() >= 1, name, ": got a scalar, want at least one dimension");
  return x.size(x.dim() - 1);
}

void check_same(const Tensor& t, const char* name, const Tensor& x, const char* x_name) {
  check_given(t, name);
  STD_TORCH_CHECK(t.scalar_type() == x.scalar_type(), name, ": got dtype ",
                  torch::headeronly::toString(t.scalar_type()), ", want that of ", x_name, ", ",
                  torch::headeronly::toString(x.scalar_type()));
  bool same = t.dim() == x.dim();
  for (int64_t i = 0; same && i < x.dim(); ++i) same = t.size(i) == x.size(i);
  STD_TORCH_CHECK(same, name, ": got shape ", shape_string(t), ", want that of ", x_name, ", ",
                  shape_string(x));
}

WeightType weight_type(const Tensor& weight) {
  check_given(weight, "weight");
  switch (weight.scalar_type()) {
    case ScalarType::Float:
      return WeightType::kFloat32;
    case ScalarType::BFloat16:
      return WeightType::kBFloat16;
    case ScalarType::Char:
      return WeightType::kInt8;
    default:
      STD_TORCH_CHECK(false, "weight: got dtype ", torch::headeronly::toString(weight.scalar_type()),
                      ", want float32, bfloat16 or int8");
  }
}

// The packed weight and what it says about the product's sizes.
LinearParams linear_params(const Tensor& weight, const OptionalTensor& bias, int64_t out_features) {
  LinearParams p;
  p.N = out_features;
  const int64_t panels = (p.N + kPanelWidth - 1) / kPanelWidth;
  p.weight_type = weight_type(weight);
  p.K = packed_inputs(weight);
  STD_TORCH_CHECK(
      p.K > 0 && weight.size(0) == panels && weight.numel() == panels * weight.size(1) * kPanelWidth,
      "weight: got shape ", shape_string(weight), ", want panels as pack_weight makes them for ", p.N,
      " outputs");
  check_contiguous(weight, "weight");
  p.weight = weight.const_data_ptr();
  if (bias.has_value()) p.bias = float_vector(*bias, "bias", p.N, "[out]");
  return p;
}

// p.x is set.
Tensor run_linear(LinearParams& p, const Tensor& x, OptionalTensor& residual) {
  Tensor y = new_output(x, p.N, aoti_dtype(x));
  if (residual.has_value()) {
    check_same(*residual, "residual", y, "the result");
    if (!residual->is_contiguous()) residual = torch::stable::contiguous(*residual);
    p.residual = residual->const_data_ptr();
  }
  p.y = y.mutable_data_ptr();
  check_status(cpu::linear(p), "linear");
  return y;
}

Tensor linear(Tensor x, Tensor weight, OptionalTensor bias, int64_t out_features, OptionalTensor residual) {
  LinearParams p = linear_params(weight, bias, out_features);
  p.x = rows_view(x, "x", p.K);
  return run_linear(p, x, residual);
}

}  // namespace

int64_t packed_inputs(const Tensor& weight) {
  if (weight.dim() < 2) return 0;
  return weight.size(1) - (weight.scalar_type() == ScalarType::Char ? kScaleRows : 0);
}

Tensor rms_norm_linear(Tensor x, Tensor norm_weight, double eps, Tensor weight, OptionalTensor bias,
                       int64_t out_features, OptionalTensor gate, OptionalTensor residual) {
  LinearParams p = linear_params(weight, bias, out_features);
  p.input = LinearInput::kRmsNorm;
  p.norm_size = last_size(norm_weight, "norm_weight");
  p.norm_weight = float_vector(norm_weight, "norm_weight", p.norm_size, "[D]");
  STD_TORCH_CHECK(p.norm_size > 0 && p.K % p.norm_size == 0, "norm_weight: got shape ",
                  shape_string(norm_weight), ", want [D] with D a divisor of the weight's ", p.K, " inputs");
  p.x = rows_view(x, "x", p.K);
  p.norm_eps = static_cast<float>(eps);
  if (gate.has_value()) {
    check_same(*gate, "gate", x, "x");
    p.has_gate = true;
    p.gate = rows_view(*gate, "gate", p.K);
  }
  return run_linear(p, x, residual);
}

Tensor swiglu_linear(Tensor x, Tensor weight, OptionalTensor bias, int64_t out_features,
                     OptionalTensor residual) {
  LinearParams p = linear_params(weight, bias, out_features);
  p.input = LinearInput::kSwiglu;
  p.x = rows_view(x, "x", 2 * p.K);
  return run_linear(p, x, residual);
}

namespace {

Tensor rms_norm(Tensor x, Tensor weight, double eps, OptionalTensor gate) {
  RmsNormParams p;
  p.D = last_size(x, "x");
  p.x = rows_view(x, "x", p.D);
  p.weight = float_vector(weight, "weight", p.D, "[D]");
  p.eps = static_cast<float>(eps);
  if (gate.has_value()) {
    check_same(*gate, "gate", x, "x");
    p.has_gate = true;
    p.gate = rows_view(*gate, "gate", p.D);
  }
  Tensor y = new_output(x, p.D, aoti_dtype(x));
  p.y = y.mutable_data_ptr();
  check_status(cpu::rms_norm(p), "rms_norm");
  return y;
}

Tensor swiglu(Tensor x) {
  SwigluParams p;
  const int64_t width = last_size(x, "x");
  STD_TORCH_CHECK(width % 2 == 0, "x: got shape ", shape_string(x),
                  ", want an even last dimension: gate, up");
  p.x = rows_view(x, "x", width);
  p.F = width / 2;
  Tensor y = new_output(x, p.F, aoti_dtype(x));
  p.y = y.mutable_data_ptr();
  check_status(cpu::swiglu(p), "swiglu");
  return y;
}

std::tuple<Tensor, Tensor> gated_delta_gates(Tensor a, Tensor b, Tensor A_log, Tensor dt_bias,
                                             bool neg_eigval) {
  GatesParams p;
  p.HV = last_size(a, "a");
  p.a = rows_view(a, "a", p.HV);
  check_same(b, "b", a, "a");
  p.b = rows_view(b, "b", p.HV);
  p.A_log = float_vector(A_log, "A_log", p.HV, "[HV]");
  p.dt_bias = float_vector(dt_bias, "dt_bias", p.HV, "[HV]");
  p.neg_eigval = neg_eigval;
  Tensor g = new_output(a, p.HV, aoti_torch_dtype_float32());
  Tensor beta = new_output(a, p.HV, aoti_torch_dtype_float32());
  p.g = static_cast<float*>(g.mutable_data_ptr());
  p.beta = static_cast<float*>(beta.mutable_data_ptr());
  check_status(cpu::gated_delta_gates(p), "gated_delta_gates");
  return {g, beta};
}

Tensor rotate_heads(const Tensor& x, const Tensor& rotation) {
  RotateHeadsParams p;
  check_shape(x, "x", {-1, -1, -1, -1}, "[B, N, H, D]");
  p.dtype = float_dtype(x, "x");
  check_last_contiguous(x, "x");
  p.B = x.size(0);
  p.N = x.size(1);
  p.H = x.size(2);
  p.D = x.size(3);
  STD_TORCH_CHECK(p.D % 2 == 0, "x: got D = ", p.D, ", want an even number");
  check_dtype(rotation, "rotation", ScalarType::Float);
  check_shape(rotation, "rotation", {p.B, p.N, 2, p.D}, "[B, N, 2, D]");
  check_last_contiguous(rotation, "rotation");
  STD_TORCH_CHECK(p.D == 0 || rotation.stride(2) == p.D, "rotation: got stride ", rotation.stride(2),
                  " from cosines to sines, want D = ", p.D);
  p.x = x.const_data_ptr();
  p.x_stride = {x.stride(0), x.stride(1), x.stride(2)};
  p.rotation = static_cast<const float*>(rotation.const_data_ptr());
  p.rotation_stride_b = rotation.stride(0);
  p.rotation_stride_n = rotation.stride(1);
  Tensor y = new_contiguous(Device{}, {p.B, p.N, p.H, p.D}, aoti_dtype(x));
  p.y = y.mutable_data_ptr();
  check_status(cpu::rotate_heads(p), "rotate_heads");
  return y;
}

}  // namespace

}  // namespace specdec::binding

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, int out_features, Tensor? residual=None) -> Tensor");
  m.def(
      "rms_norm_linear(Tensor x, Tensor norm_weight, float eps, Tensor weight, Tensor? bias, "
      "int out_features, Tensor? gate=None, Tensor? residual=None) -> Tensor");
  m.def(
      "swiglu_linear(Tensor x, Tensor weight, Tensor? bias, int out_features, "
      "Tensor? residual=None) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, Tensor? gate=None) -> Tensor");
  m.def("swiglu(Tensor x) -> Tensor");
  m.def(
      "gated_delta_gates(Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, "
      "bool neg_eigval=False) -> (Tensor, Tensor)");
  m.def("rotate_heads(Tensor x, Tensor rotation) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("linear", TORCH_BOX(&specdec::binding::linear));
  m.impl("rms_norm_linear", TORCH_BOX(&specdec::binding::rms_norm_linear));
  m.impl("swiglu_linear", TORCH_BOX(&specdec::binding::swiglu_linear));
  m.impl("rms_norm", TORCH_BOX(&specdec::binding::rms_norm));
  m.impl("swiglu", TORCH_BOX(&specdec::binding::swiglu));
  m.impl("gated_delta_gates", TORCH_BOX(&specdec::binding::gated_delta_gates));
  m.impl("rotate_heads", TORCH_BOX(&specdec::binding::rotate_heads));
}
