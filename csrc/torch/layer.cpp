// Bindings of a Gated DeltaNet layer between its projections: verify_layer, verify_layer_deferred.
#include "layer.h"

#include "backend.h"
#include "conv_args.h"

namespace specdec::binding {

namespace {

// [B, N, HV] in the dtype of mixed.
const void* gate_input(const Tensor& t, const char* name, const VerifyParams& v, const Tensor& mixed,
                       Strides* strides) {
  check_dtype(t, name, mixed.scalar_type());
  check_shape(t, name, {v.B, v.N, v.rec.HV}, "[B, N, HV]");
  check_last_contiguous(t, name);
  *strides = {t.stride(0), t.stride(1), 1};
  return present<char>(t);
}

// The arguments that both forms share.
struct Layer {
  const Tensor &mixed, &a, &b, &conv_weight;
  const OptionalTensor& conv_bias;
  const Tensor &A_log, &dt_bias;
  bool neg_eigval;
  const Tensor &conv_state, &state;
  const OptionalTensor& norm_weight;
  double norm_eps;
  const OptionalTensor& norm_gate;
  std::optional<double> scale;
  int64_t strategy;
  const OptionalTensor &slots, &parents, &lengths;

  // Everything that is only read, with what the form has besides.
  std::vector<Named> inputs(std::initializer_list<Named> earlier) const {
    std::vector<Named> all = {{"mixed", mixed},
                              {"a", a},
                              {"b", b},
                              {"conv_weight", conv_weight},
                              {"conv_bias", conv_bias},
                              {"A_log", A_log},
                              {"dt_bias", dt_bias},
                              {"slots", slots},
                              {"parents", parents},
                              {"lengths", lengths},
                              {"norm_weight", norm_weight},
                              {"norm_gate", norm_gate}};
    all.insert(all.end(), earlier);
    return all;
  }

  VerifyLayerParams params(Access access) const {
    VerifyLayerParams p;
    ConvVerifyParams conv;
    fill_convolution(conv, mixed, conv_weight, conv_bias, conv_state, static_cast<int64_t>(Activation::kSilu),
                     access, {"mixed", "conv_weight", "conv_bias"});
    VerifyParams& v = p.verify;
    v.B = conv.B;
    v.N = conv.N;
    v.dtype = conv.x.dtype;
    v.rec = recurrence(conv.C);
    v.state = state_view(state, v.rec, access);
    v.scale = static_cast<float>(scale.has_value() ? *scale : 1.0 / std::sqrt(static_cast<double>(v.rec.DK)));
    v.qk_l2norm = true;
    v.strategy = strategy_of(strategy);
    STD_TORCH_CHECK(v.strategy != Strategy::kSolve, "strategy: got 2 (solve), want 0 (serial) or 1 (hybrid)");
    p.has_prologue = true;
    LayerPrologue& from = p.prologue;
    from.mixed = conv.x;
    from.W = conv.W;
    from.weight = conv.weight;
    from.bias = conv.bias;
    from.window = conv.state;
    from.a = gate_input(a, "a", v, mixed, &from.a_stride);
    from.b = gate_input(b, "b", v, mixed, &from.b_stride);
    from.A_log = float_vector(A_log, "A_log", v.rec.HV, "[HV]");
    from.dt_bias = float_vector(dt_bias, "dt_bias", v.rec.HV, "[HV]");
    from.neg_eigval = neg_eigval;
    fill_epilogue(p);
    return p;
  }

  // Both pools have a slot for every row.
  Rows fill_rows(VerifyLayerParams& p) const {
    const Rows rows = fill_tree(p.verify, "state", slots, parents, lengths, p.verify.prefix.nodes);
    slots_view(slots, p.verify.B, p.prologue.window.slots, "conv_state");
    return rows;
  }

  Verified finish(VerifyLayerParams& p, const Operands& operands, const Device& device) const {
    const Verified made = new_outputs(p.verify, device, aoti_dtype(mixed));
    const auto& [out, k, u, g] = made;
    const Named outputs[] = {{"out", out}, {"k_out", k}, {"u_out", u}, {"g_out", g}};
    check_status(run(p, operands, outputs), "verify_layer");
    return made;
  }

 private:
  // HV, DV and DK are the state's; the rest of the C channels are those of q and k.
  Recurrence recurrence(int64_t C) const {
    check_shape(state, "state", {-1, -1, -1, -1}, "[S, HV, DV, DK]");
    const int64_t HV = state.size(1), DV = state.size(2), DK = state.size(3);
    check_widths(DK, DV, "state", "state");
    const int64_t HK = (C - HV * DV) / (2 * DK);
    STD_TORCH_CHECK(HK >= 1 && C == 2 * HK * DK + HV * DV && HV >= 1 && HV % HK == 0, "mixed: got ", C,
                    " channels, want 2 HK DK + HV DV for HV = ", HV, ", DV = ", DV, ", DK = ", DK,
                    " of the state and HK a divisor of HV");
    return {Gate::kHead, Update::kDelta, HK, HV, DK, DV};
  }

  void fill_epilogue(VerifyLayerParams& p) const {
    p.has_epilogue = norm_weight.has_value();
    if (!p.has_epilogue) {
      STD_TORCH_CHECK(!norm_gate.has_value(),
                      "norm_gate: got a tensor without norm_weight, want both or none");
      return;
    }
    const VerifyParams& v = p.verify;
    p.epilogue.weight = float_vector(*norm_weight, "norm_weight", v.rec.DV, "[DV]");
    p.epilogue.eps = static_cast<float>(norm_eps);
    if (!norm_gate.has_value()) return;
    check_dtype(*norm_gate, "norm_gate", mixed.scalar_type());
    check_shape(*norm_gate, "norm_gate", {v.B, v.N, v.rec.HV, v.rec.DV}, "[B, N, HV, DV]");
    check_last_contiguous(*norm_gate, "norm_gate");
    p.epilogue.gate = present<char>(*norm_gate);
    p.epilogue.gate_stride = strides_of(*norm_gate);
  }
};

// Raw inputs of `nodes` earlier nodes.
ConvInputView earlier_input(const Tensor& x, const char* name, const VerifyLayerParams& p,
                            const Tensor& mixed, int64_t nodes, const char* factors) {
  const ConvInputView view = conv_input(x, name, p.verify.B, LayerChannels(p.verify.rec, 0, 0).count);
  check_dtype(x, name, mixed.scalar_type());
  STD_TORCH_CHECK(view.nodes == nodes, name, ": got ", view.nodes, " nodes, want the ", nodes, " of ",
                  factors);
  return view;
}

}  // namespace

Verified verify_layer(const Tensor& mixed, const Tensor& a, const Tensor& b, const Tensor& conv_weight,
                      const OptionalTensor& conv_bias, const Tensor& A_log, const Tensor& dt_bias,
                      bool neg_eigval, const Tensor& conv_state, const Tensor& state,
                      const OptionalTensor& slots, const OptionalTensor& parents,
                      const OptionalTensor& lengths, const OptionalTensor& prefix_k,
                      const OptionalTensor& prefix_u, const OptionalTensor& prefix_g,
                      const OptionalTensor& prefix_parents, const OptionalTensor& prefix_mixed,
                      const OptionalTensor& norm_weight, double norm_eps, const OptionalTensor& norm_gate,
                      std::optional<double> scale, int64_t strategy) {
  const Layer layer{mixed,     a,          b,          conv_weight, conv_bias,   A_log,
                    dt_bias,   neg_eigval, conv_state, state,       norm_weight, norm_eps,
                    norm_gate, scale,      strategy,   slots,       parents,     lengths};
  const std::vector<Named> inputs = layer.inputs({{"prefix.factors.k", prefix_k},
                                                  {"prefix.factors.u", prefix_u},
                                                  {"prefix.factors.g", prefix_g},
                                                  {"prefix.parents", prefix_parents},
                                                  {"prefix_mixed", prefix_mixed}});
  const Operands operands{{{"state", state}, {"conv_state", conv_state}}, Access::kRead, inputs};
  const Device device = device_of(operands);
  VerifyLayerParams p = layer.params(Access::kRead);
  VerifyParams& v = p.verify;
  v.has_prefix = prefix_k.has_value();
  if (v.has_prefix) {
    STD_TORCH_CHECK(prefix_u.has_value(), "prefix.factors.u: got None, want a tensor");
    STD_TORCH_CHECK(prefix_mixed.has_value(), "prefix_mixed: got None, want a tensor");
    v.prefix = factors_view(*prefix_k, *prefix_u, prefix_g,
                            {"prefix.factors.k", "prefix.factors.u", "prefix.factors.g"}, v.B, v.rec);
    p.prologue.prefix =
        earlier_input(*prefix_mixed, "prefix_mixed", p, mixed, v.prefix.nodes, "prefix.factors");
  }
  check_node_count(v.strategy, v.N, v.prefix.nodes, "mixed");
  const Rows rows = layer.fill_rows(p);
  if (v.has_prefix) {
    v.prefix_parents = parents_view(prefix_parents, "prefix.parents", rows, v.prefix.nodes, 0, nullptr);
  }
  return layer.finish(p, operands, device);
}

Verified verify_layer_deferred(const Tensor& mixed, const Tensor& a, const Tensor& b,
                               const Tensor& conv_weight, const OptionalTensor& conv_bias,
                               const Tensor& A_log, const Tensor& dt_bias, bool neg_eigval,
                               const Tensor& conv_state, const Tensor& state, const OptionalTensor& slots,
                               const OptionalTensor& parents, const OptionalTensor& lengths,
                               const Tensor& pending_k, const Tensor& pending_u,
                               const OptionalTensor& pending_g, const OptionalTensor& pending_path,
                               const OptionalTensor& pending_path_lengths, const Tensor& pending_mixed,
                               const OptionalTensor& norm_weight, double norm_eps,
                               const OptionalTensor& norm_gate, std::optional<double> scale,
                               int64_t strategy) {
  const Layer layer{mixed,     a,          b,          conv_weight, conv_bias,   A_log,
                    dt_bias,   neg_eigval, conv_state, state,       norm_weight, norm_eps,
                    norm_gate, scale,      strategy,   slots,       parents,     lengths};
  const std::vector<Named> inputs = layer.inputs({{"pending.factors.k", pending_k},
                                                  {"pending.factors.u", pending_u},
                                                  {"pending.factors.g", pending_g},
                                                  {"pending.path", pending_path},
                                                  {"pending.path_lengths", pending_path_lengths},
                                                  {"pending_mixed", pending_mixed}});
  const Operands operands{{{"state", state}, {"conv_state", conv_state}}, Access::kWrite, inputs};
  const Device device = device_of(operands);
  VerifyLayerParams p = layer.params(Access::kWrite);
  VerifyParams& v = p.verify;
  check_node_count(v.strategy, v.N, 0, "mixed");
  v.pending = factors_view(pending_k, pending_u, pending_g,
                           {"pending.factors.k", "pending.factors.u", "pending.factors.g"}, v.B, v.rec);
  p.prologue.pending =
      earlier_input(pending_mixed, "pending_mixed", p, mixed, v.pending.nodes, "pending.factors");
  const Rows rows = layer.fill_rows(p);
  fill_pending_path(v, rows, pending_path, pending_path_lengths);
  check_apart(operands);
  return layer.finish(p, operands, device);
}

}  // namespace specdec::binding

SPECDEC_OPERATORS(m) {
  m.impl("verify_layer", TORCH_BOX(&specdec::binding::verify_layer));
  m.impl("verify_layer_deferred", TORCH_BOX(&specdec::binding::verify_layer_deferred));
}
