// Bindings of a whole Gated DeltaNet block: verify_block, verify_block_deferred. They do what the operators
// do that a block consists of, in one call: with a few rows a call costs as much as its work.
#include "dense.h"
#include "layer.h"

namespace specdec::binding {

namespace {

using Block = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;  // x, o, mixed, factors k, u, g

// The weights in the order of the schema's list.
struct Weights {
  explicit Weights(const std::vector<Tensor>& list) : all(list) {
    STD_TORCH_CHECK(list.size() == 10, "weights: got ", list.size(), " tensors, want 10");
  }
  const Tensor& mixer_norm() const { return all[0]; }
  const Tensor& projections() const { return all[1]; }
  const Tensor& conv() const { return all[2]; }
  const Tensor& A_log() const { return all[3]; }
  const Tensor& dt_bias() const { return all[4]; }
  const Tensor& head_norm() const { return all[5]; }
  const Tensor& out() const { return all[6]; }
  const Tensor& mlp_norm() const { return all[7]; }
  const Tensor& gate_up() const { return all[8]; }
  const Tensor& down() const { return all[9]; }

  const std::vector<Tensor>& all;
};

// The mixer's inputs side by side: q k v [B, N, C], the output gate [B, N, HV DV] or none, a, b [B, N, HV].
struct Projected {
  Projected(const Tensor& x, const Weights& w, const Tensor& state, double eps, bool gated) {
    check_shape(x, "x", {-1, -1, -1}, "[B, N, D]");
    check_shape(state, "state", {-1, -1, -1, -1}, "[S, HV, DV, DK]");
    check_shape(w.conv(), "weights[2]", {-1, -1}, "[C, W]");
    const int64_t C = w.conv().size(0), HV = state.size(1), values = gated ? HV * state.size(2) : 0;
    const int64_t width = C + values + 2 * HV;
    const Tensor y = rms_norm_linear(x, w.mixer_norm(), eps, w.projections(), {}, width, {}, {});
    mixed = torch::stable::narrow(const_cast<Tensor&>(y), 2, 0, C);
    if (gated) gate = torch::stable::narrow(const_cast<Tensor&>(y), 2, C, values);
    a = torch::stable::narrow(const_cast<Tensor&>(y), 2, C + values, HV);
    b = torch::stable::narrow(const_cast<Tensor&>(y), 2, C + values + HV, HV);
  }

  Tensor mixed, a, b;
  OptionalTensor gate;
};

// Head norm, output projection and the MLP, with both residuals.
Block finish(const Tensor& x, const Weights& w, const Projected& from, const Verified& verified, double eps) {
  const auto& [o, k, u, g] = verified;
  const int64_t D = x.size(2);
  const Tensor heads = torch::stable::view(o, {o.size(0), o.size(1), o.size(2) * o.size(3)});
  const Tensor middle = rms_norm_linear(heads, w.head_norm(), eps, w.out(), {}, D, from.gate, x);
  check_shape(w.down(), "weights[9]", {-1, -1, -1, -1}, "a packed weight");
  const Tensor wide =
      rms_norm_linear(middle, w.mlp_norm(), eps, w.gate_up(), {}, 2 * w.down().size(1), {}, {});
  return {swiglu_linear(wide, w.down(), {}, D, middle), o, from.mixed, k, u, g};
}

Block verify_block(Tensor x, std::vector<Tensor> weights, OptionalTensor conv_bias, bool gated, double eps,
                   bool neg_eigval, Tensor conv_state, Tensor state, OptionalTensor slots,
                   OptionalTensor parents, OptionalTensor lengths, OptionalTensor prefix_k,
                   OptionalTensor prefix_u, OptionalTensor prefix_g, OptionalTensor prefix_parents,
                   OptionalTensor prefix_mixed, std::optional<double> scale, int64_t strategy) {
  const Weights w(weights);
  const Projected from(x, w, state, eps, gated);
  return finish(x, w, from,
                verify_layer(from.mixed, from.a, from.b, w.conv(), conv_bias, w.A_log(), w.dt_bias(),
                             neg_eigval, conv_state, state, slots, parents, lengths, prefix_k, prefix_u,
                             prefix_g, prefix_parents, prefix_mixed, {}, eps, {}, scale, strategy),
                eps);
}

Block verify_block_deferred(Tensor x, std::vector<Tensor> weights, OptionalTensor conv_bias, bool gated,
                            double eps, bool neg_eigval, Tensor conv_state, Tensor state,
                            OptionalTensor slots, OptionalTensor parents, OptionalTensor lengths,
                            Tensor pending_k, Tensor pending_u, OptionalTensor pending_g,
                            OptionalTensor pending_path, OptionalTensor pending_path_lengths,
                            Tensor pending_mixed, std::optional<double> scale, int64_t strategy) {
  const Weights w(weights);
  const Projected from(x, w, state, eps, gated);
  return finish(
      x, w, from,
      verify_layer_deferred(from.mixed, from.a, from.b, w.conv(), conv_bias, w.A_log(), w.dt_bias(),
                            neg_eigval, conv_state, state, slots, parents, lengths, pending_k, pending_u,
                            pending_g, pending_path, pending_path_lengths, pending_mixed, {}, eps, {}, scale,
                            strategy),
      eps);
}

}  // namespace

}  // namespace specdec::binding

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def(
      "verify_block(Tensor x, Tensor[] weights, Tensor? conv_bias, bool gated, float eps, bool neg_eigval, "
      "Tensor conv_state, Tensor state, Tensor? slots, Tensor? parents, Tensor? lengths, Tensor? prefix_k, "
      "Tensor? prefix_u, Tensor? prefix_g, Tensor? prefix_parents, Tensor? prefix_mixed, float? scale, "
      "int strategy) -> (Tensor x, Tensor o, Tensor mixed, Tensor k, Tensor u, Tensor g)");
  m.def(
      "verify_block_deferred(Tensor x, Tensor[] weights, Tensor? conv_bias, bool gated, float eps, "
      "bool neg_eigval, Tensor(a!) conv_state, Tensor(b!) state, Tensor? slots, Tensor? parents, "
      "Tensor? lengths, Tensor pending_k, Tensor pending_u, Tensor? pending_g, Tensor? pending_path, "
      "Tensor? pending_path_lengths, Tensor pending_mixed, float? scale, int strategy) -> "
      "(Tensor x, Tensor o, Tensor mixed, Tensor k, Tensor u, Tensor g)");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("verify_block", TORCH_BOX(&specdec::binding::verify_block));
  m.impl("verify_block_deferred", TORCH_BOX(&specdec::binding::verify_block_deferred));
}
