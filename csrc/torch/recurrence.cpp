// Bindings of the recurrences: verify, verify_deferred, commit.
#include "backend.h"
#include "recurrence_args.h"

namespace specdec::binding {

namespace {

// What both forms of the verification share, but for the tree.
void fill(VerifyParams& p, const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
          const OptionalTensor& beta, const Tensor& state, std::optional<double> scale, bool qk_l2norm,
          int64_t strategy, int64_t precision, Access access) {
  fill_tokens(p, q, k, v, g, beta, scale, qk_l2norm);
  p.B = q.size(0);
  p.N = q.size(1);
  p.strategy = strategy_of(strategy);
  p.precision = precision_of(precision, p.strategy == Strategy::kSolve);
  p.state = state_view(state, p.rec, access);
}

Verified finish(VerifyParams& p, const Operands& operands, const Device& device, const Tensor& v) {
  const Verified made = new_outputs(p, device, aoti_dtype(v));
  const auto& [out, k, u, g] = made;
  const Named outputs[] = {{"out", out}, {"k_out", k}, {"u_out", u}, {"g_out", g}};
  check_status(run(p, operands, outputs), "verify");
  return made;
}

Verified verify(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                const OptionalTensor& beta, const Tensor& state, const OptionalTensor& slots,
                const OptionalTensor& parents, const OptionalTensor& lengths, const OptionalTensor& prefix_k,
                const OptionalTensor& prefix_u, const OptionalTensor& prefix_g,
                const OptionalTensor& prefix_parents, std::optional<double> scale, bool qk_l2norm,
                int64_t strategy, int64_t precision) {
  const Named inputs[] = {{"q", q},
                          {"k", k},
                          {"v", v},
                          {"g", g},
                          {"beta", beta},
                          {"slots", slots},
                          {"parents", parents},
                          {"lengths", lengths},
                          {"prefix.factors.k", prefix_k},
                          {"prefix.factors.u", prefix_u},
                          {"prefix.factors.g", prefix_g},
                          {"prefix.parents", prefix_parents}};
  const Operands operands{{{"state", state}}, Access::kRead, inputs};
  const Device device = device_of(operands);
  VerifyParams p;
  fill(p, q, k, v, g, beta, state, scale, qk_l2norm, strategy, precision, Access::kRead);
  p.has_prefix = prefix_k.has_value();
  if (p.has_prefix) {
    STD_TORCH_CHECK(p.strategy != Strategy::kSolve,
                    "prefix: got a prefix with strategy solve, want serial or hybrid");
    STD_TORCH_CHECK(prefix_u.has_value(), "prefix.factors.u: got None, want a tensor");
    p.prefix = factors_view(*prefix_k, *prefix_u, prefix_g,
                            {"prefix.factors.k", "prefix.factors.u", "prefix.factors.g"}, p.B, p.rec);
  }
  check_node_count(p.strategy, p.N, p.prefix.nodes);
  const Rows rows = fill_tree(p, "state", slots, parents, lengths, p.prefix.nodes);
  if (p.has_prefix) {
    p.prefix_parents = parents_view(prefix_parents, "prefix.parents", rows, p.prefix.nodes, 0, nullptr);
  }
  return finish(p, operands, device, v);
}

Verified verify_deferred(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                         const OptionalTensor& beta, const Tensor& state, const OptionalTensor& slots,
                         const OptionalTensor& parents, const OptionalTensor& lengths,
                         const Tensor& pending_k, const Tensor& pending_u, const OptionalTensor& pending_g,
                         const OptionalTensor& pending_path, const OptionalTensor& pending_path_lengths,
                         std::optional<double> scale, bool qk_l2norm, int64_t strategy, int64_t precision) {
  const Named inputs[] = {{"q", q},
                          {"k", k},
                          {"v", v},
                          {"g", g},
                          {"beta", beta},
                          {"slots", slots},
                          {"parents", parents},
                          {"lengths", lengths},
                          {"pending.factors.k", pending_k},
                          {"pending.factors.u", pending_u},
                          {"pending.factors.g", pending_g},
                          {"pending.path", pending_path},
                          {"pending.path_lengths", pending_path_lengths}};
  const Operands operands{{{"state", state}}, Access::kWrite, inputs};
  const Device device = device_of(operands);
  VerifyParams p;
  fill(p, q, k, v, g, beta, state, scale, qk_l2norm, strategy, precision, Access::kWrite);
  check_node_count(p.strategy, p.N, 0);
  p.pending = factors_view(pending_k, pending_u, pending_g,
                           {"pending.factors.k", "pending.factors.u", "pending.factors.g"}, p.B, p.rec);
  const Rows rows = fill_tree(p, "state", slots, parents, lengths, 0);
  fill_pending_path(p, rows, pending_path, pending_path_lengths);
  check_apart(operands);
  return finish(p, operands, device, v);
}

void commit(const Tensor& state, const Tensor& k, const Tensor& u, const OptionalTensor& g,
            const OptionalTensor& path, const OptionalTensor& path_lengths, const OptionalTensor& slots,
            int64_t mode) {
  const Named inputs[] = {
      {"factors.k", k}, {"factors.u", u}, {"factors.g", g}, {"path", path}, {"path_lengths", path_lengths},
      {"slots", slots}};
  const Operands operands{{{"state", state}}, Access::kWrite, inputs};
  device_of(operands);
  check_shape(k, "factors.k", {-1, -1, -1, -1}, "[B, N, HK, DK]");
  check_shape(u, "factors.u", {-1, -1, -1, -1}, "[B, N, HV, DV]");
  CommitParams p;
  p.B = k.size(0);
  p.rec.HK = k.size(2);
  p.rec.DK = k.size(3);
  p.rec.HV = u.size(2);
  p.rec.DV = u.size(3);
  check_heads(p.rec.HK, p.rec.HV);
  check_widths(p.rec.DK, p.rec.DV);
  p.rec.gate = gate_of(g, "factors.g", p.B, k.size(1), p.rec.HV, p.rec.DK);
  p.factors = factors_view(k, u, g, {"factors.k", "factors.u", "factors.g"}, p.B, p.rec);
  STD_TORCH_CHECK(mode == 0 || mode == 1, "mode: got ", mode, ", want 0 (exact) or 1 (fast)");
  p.mode = static_cast<CommitMode>(mode);
  p.state = state_view(state, p.rec, Access::kWrite);
  const Rows rows = slots_view(slots, p.B, p.state.slots, "state");
  p.slots = rows.slots;
  p.path = path_view(path, path_lengths, "path", "path_lengths", rows, p.factors.nodes);
  check_apart(operands);
  check_status(run(p, operands), "commit");
}

}  // namespace

}  // namespace specdec::binding

SPECDEC_OPERATORS(m) {
  m.impl("verify", TORCH_BOX(&specdec::binding::verify));
  m.impl("verify_deferred", TORCH_BOX(&specdec::binding::verify_deferred));
  m.impl("commit", TORCH_BOX(&specdec::binding::commit));
}
