// Bindings of a whole Gated DeltaNet block: verify_block, verify_block_deferred. They call what a block
// consists of: with a few rows, a call through the dispatcher costs as much as its work.
#include "block.h"

#include "dense.h"

namespace specdec::binding {

namespace {

// The mixer's inputs side by side, and views of them: q k v [B, N, C], the output gate [B, N, HV DV], a and b
// [B, N, HV].
struct Projected {
  Projected(const Tensor& x, const BlockWeights& w, const BlockArgs& args) {
    check_shape(x, "x", {-1, -1, -1}, "[B, N, D]");
    check_shape(w.A_log(), "A_log", {-1}, "[HV]");
    check_shape(w.head_norm(), "head_norm", {-1}, "[DV]");
    const int64_t C = w.conv().size(0), HV = w.A_log().size(0), DV = w.head_norm().size(0);
    // Others fit some other block's layer, and what comes after it would fail when the state has moved.
    check_shape(args.state, "state", {-1, HV, DV, -1}, "[S, HV, DV, DK]");
    const int64_t values = args.gated ? HV * DV : 0;
    Tensor y = rms_norm_linear(x, w.mixer_norm(), args.eps, w.projections(), {}, C + values + 2 * HV, {}, {});
    mixed = torch::stable::narrow(y, 2, 0, C);
    if (args.gated) gate = torch::stable::narrow(y, 2, C, values);
    a = torch::stable::narrow(y, 2, C + values, HV);
    b = torch::stable::narrow(y, 2, C + values + HV, HV);
  }

  Tensor mixed, a, b;
  OptionalTensor gate;
};

// Head norm, output projection and the MLP, with both residuals.
BlockOutputs finish(const Tensor& x, const BlockWeights& w, double eps, const Projected& from,
                    const Verified& verified) {
  const auto& [o, k, u, g] = verified;
  const int64_t D = x.size(2);
  const Tensor heads = torch::stable::view(o, {o.size(0), o.size(1), o.size(2) * o.size(3)});
  const Tensor mixer = rms_norm_linear(heads, w.head_norm(), eps, w.out(), {}, D, from.gate, x);
  return {w.has_mlp() ? block_mlp(mixer, w, eps) : mixer, o, from.mixed, k, u, g};
}

BlockWeights with_mixer(const std::vector<Tensor>& list) {
  const BlockWeights weights(list.data(), static_cast<int64_t>(list.size()));
  STD_TORCH_CHECK(weights.has_mixer(), "weights: got ", list.size(),
                  " tensors, want 10, or 7 without an MLP");
  return weights;
}

BlockOutputs verify_block_op(Tensor x, std::vector<Tensor> weights, OptionalTensor conv_bias, bool gated,
                             double eps, bool neg_eigval, Tensor conv_state, Tensor state,
                             OptionalTensor slots, OptionalTensor parents, OptionalTensor lengths,
                             OptionalTensor prefix_k, OptionalTensor prefix_u, OptionalTensor prefix_g,
                             OptionalTensor prefix_parents, OptionalTensor prefix_mixed,
                             std::optional<double> scale, int64_t strategy) {
  return verify_block(x,
                      {with_mixer(weights), conv_bias, gated, eps, neg_eigval, conv_state, state, slots,
                       parents, lengths, scale, strategy},
                      {prefix_k, prefix_u, prefix_g, prefix_parents, prefix_mixed});
}

BlockOutputs verify_block_deferred_op(Tensor x, std::vector<Tensor> weights, OptionalTensor conv_bias,
                                      bool gated, double eps, bool neg_eigval, Tensor conv_state,
                                      Tensor state, OptionalTensor slots, OptionalTensor parents,
                                      OptionalTensor lengths, Tensor pending_k, Tensor pending_u,
                                      OptionalTensor pending_g, OptionalTensor pending_path,
                                      OptionalTensor pending_path_lengths, Tensor pending_mixed,
                                      std::optional<double> scale, int64_t strategy) {
  return verify_block_deferred(
      x,
      {with_mixer(weights), conv_bias, gated, eps, neg_eigval, conv_state, state, slots, parents, lengths,
       scale, strategy},
      {pending_k, pending_u, pending_g, pending_path, pending_path_lengths, pending_mixed});
}

}  // namespace

BlockOutputs verify_block(const Tensor& x, const BlockArgs& args, const BlockPrefix& prefix) {
  const BlockWeights& w = args.weights;
  const Projected from(x, w, args);
  return finish(x, w, args.eps, from,
                verify_layer(from.mixed, from.a, from.b, w.conv(), args.conv_bias, w.A_log(), w.dt_bias(),
                             args.neg_eigval, args.conv_state, args.state, args.slots, args.parents,
                             args.lengths, prefix.k, prefix.u, prefix.g, prefix.parents, prefix.mixed, {},
                             args.eps, {}, args.scale, args.strategy));
}

BlockOutputs verify_block_deferred(const Tensor& x, const BlockArgs& args, const BlockPending& pending) {
  const BlockWeights& w = args.weights;
  const Projected from(x, w, args);
  const Named residual[] = {{"x", x}};  // read again when the state has been written
  check_apart(Operands{{{"state", args.state}, {"conv_state", args.conv_state}}, Access::kWrite, residual});
  return finish(
      x, w, args.eps, from,
      verify_layer_deferred(from.mixed, from.a, from.b, w.conv(), args.conv_bias, w.A_log(), w.dt_bias(),
                            args.neg_eigval, args.conv_state, args.state, args.slots, args.parents,
                            args.lengths, pending.k, pending.u, pending.g, pending.path, pending.path_lengths,
                            pending.mixed, {}, args.eps, {}, args.scale, args.strategy));
}

Tensor block_mlp(const Tensor& x, const BlockWeights& w, double eps) {
  const Tensor wide =
      rms_norm_linear(x, w.mlp_norm(), eps, w.gate_up(), {}, 2 * packed_inputs(w.down()), {}, {});
  return swiglu_linear(wide, w.down(), {}, x.size(2), x);
}

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
  m.impl("verify_block", TORCH_BOX(&specdec::binding::verify_block_op));
  m.impl("verify_block_deferred", TORCH_BOX(&specdec::binding::verify_block_deferred_op));
}
