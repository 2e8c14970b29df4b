// Bindings of the recurrences: verify, verify_deferred, commit, prefill.
#include <cmath>
#include <tuple>

#include "../cpu/ops.h"
#include "views.h"

namespace specdec::binding {

namespace {

using Verified = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // out, factors k, u, g

void check_widths(int64_t DK, int64_t DV) {
  STD_TORCH_CHECK(DK == 32 || DK == 64 || DK == 96 || DK == 128 || DK == 192 || DK == 256, "k: got DK = ", DK,
                  ", want 32, 64, 96, 128, 192 or 256");
  STD_TORCH_CHECK(DV >= 32 && DV <= 512 && DV % 32 == 0, "v: got DV = ", DV,
                  ", want a multiple of 32 up to 512");
}

void check_heads(int64_t HK, int64_t HV) {
  STD_TORCH_CHECK(HK >= 1 && HV >= 1 && HV % HK == 0, "v: got ", HV, " value heads, want a multiple of the ",
                  HK, " key heads");
}

Strides strides_of(const Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2)}; }

// g [B, N, HV] or [B, N, HV, DK]; `name` is the argument's.
Gate gate_of(const OptionalTensor& g, const char* name, int64_t B, int64_t N, int64_t HV, int64_t DK) {
  if (!g.has_value()) return Gate::kNone;
  check_dtype(*g, name, ScalarType::Float);
  if (g->dim() == 4) {
    check_shape(*g, name, {B, N, HV, DK}, "[B, N, HV, DK]");
    return Gate::kChannel;
  }
  check_shape(*g, name, {B, N, HV}, "[B, N, HV]");
  return Gate::kHead;
}

// q, k, v, g and beta of `verify` and `prefill`; `tokens` is N or T.
template <typename Params>
void fill_tokens(Params& p, const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                 const OptionalTensor& beta, std::optional<double> scale, bool qk_l2norm) {
  check_shape(q, "q", {-1, -1, -1, -1}, "[B, N, HK, DK]");
  const int64_t B = q.size(0), N = q.size(1), HK = q.size(2), DK = q.size(3);
  check_shape(k, "k", {B, N, HK, DK}, "the shape of q");
  check_shape(v, "v", {B, N, -1, -1}, "[B, N, HV, DV]");
  const int64_t HV = v.size(2), DV = v.size(3);
  check_heads(HK, HV);
  check_widths(DK, DV);
  p.dtype = float_dtype(q, "q");
  check_dtype(k, "k", q.scalar_type());
  check_dtype(v, "v", q.scalar_type());
  check_last_contiguous(q, "q");
  check_last_contiguous(k, "k");
  check_last_contiguous(v, "v");
  p.rec = {
      gate_of(g, "g", B, N, HV, DK), beta.has_value() ? Update::kDelta : Update::kAdditive, HK, HV, DK, DV};
  p.q = q.const_data_ptr();
  p.k = k.const_data_ptr();
  p.v = v.const_data_ptr();
  p.q_stride = strides_of(q);
  p.k_stride = strides_of(k);
  p.v_stride = strides_of(v);
  if (g.has_value()) {
    check_last_contiguous(*g, "g");
    p.g = static_cast<const float*>(g->const_data_ptr());
    p.g_stride = strides_of(*g);
  }
  if (beta.has_value()) {
    check_dtype(*beta, "beta", ScalarType::Float);
    check_shape(*beta, "beta", {B, N, HV}, "[B, N, HV]");
    check_last_contiguous(*beta, "beta");
    p.beta = static_cast<const float*>(beta->const_data_ptr());
    p.beta_stride = strides_of(*beta);
  }
  p.scale = static_cast<float>(scale.has_value() ? *scale : 1.0 / std::sqrt(static_cast<double>(DK)));
  p.qk_l2norm = qk_l2norm;
}

StateView state_view(const Tensor& state, const Recurrence& rec, Access access) {
  STD_TORCH_CHECK(state.scalar_type() == ScalarType::Float || state.scalar_type() == ScalarType::BFloat16,
                  "state: got dtype ", torch::headeronly::toString(state.scalar_type()),
                  ", want float32 or bfloat16");
  check_shape(state, "state", {-1, rec.HV, rec.DV, rec.DK}, "[S, HV, DV, DK]");
  check_pool(state, "state", access);
  return {pool_data(state, access), float_dtype(state, "state"), state.size(0), state.stride(0)};
}

// Names of one group of factors in error messages.
struct FactorNames {
  const char *k, *u, *g;
};

FactorsView factors_view(const Tensor& k, const Tensor& u, const OptionalTensor& g, const FactorNames& names,
                         int64_t B, const Recurrence& rec) {
  check_dtype(k, names.k, ScalarType::Float);
  check_dtype(u, names.u, ScalarType::Float);
  check_shape(k, names.k, {B, -1, rec.HK, rec.DK}, "[B, N, HK, DK]");
  const int64_t N = k.size(1);
  check_shape(u, names.u, {B, N, rec.HV, rec.DV}, "[B, N, HV, DV]");
  check_contiguous(k, names.k);
  check_contiguous(u, names.u);
  const Gate gate = gate_of(g, names.g, B, N, rec.HV, rec.DK);
  STD_TORCH_CHECK(gate == rec.gate, names.g, ": got another kind of gate than g, want the same (none, per ",
                  "head or per channel)");
  if (g.has_value()) check_contiguous(*g, names.g);
  return {static_cast<const float*>(k.const_data_ptr()), static_cast<const float*>(u.const_data_ptr()),
          g.has_value() ? static_cast<const float*>(g->const_data_ptr()) : nullptr, N};
}

void check_node_count(Strategy strategy, int64_t N, int64_t prefix) {
  const int64_t most = strategy == Strategy::kSolve ? kMaxSolveNodes : kMaxSerialNodes;
  STD_TORCH_CHECK(N + prefix <= most, "q: got ", N, " new nodes and ", prefix, " prefix nodes, want at most ",
                  most, " in all with strategy ",
                  strategy == Strategy::kSolve ? "solve" : "serial or hybrid");
}

Strategy strategy_of(int64_t code) {
  STD_TORCH_CHECK(code >= 0 && code <= 2, "strategy: got ", code,
                  ", want 0 (serial), 1 (hybrid) or 2 (solve)");
  return static_cast<Strategy>(code);
}

Rows fill_tree(VerifyParams& p, const Tensor& state, const OptionalTensor& slots,
               const OptionalTensor& parents, const OptionalTensor& lengths, int64_t first, Access access) {
  p.state = state_view(state, p.rec, access);
  const Rows rows = rows_view(slots, p.B, p.state.slots, "state");
  p.slots = rows.slots;
  p.lengths = int32_or_null(lengths, "lengths", {p.B}, "[B]");
  p.parents = parents_view(parents, "parents", rows, p.N, first, p.lengths);
  return rows;
}

Verified run(VerifyParams& p, const Tensor& v) {
  const Recurrence& r = p.rec;
  Tensor out = new_contiguous({p.B, p.N, r.HV, r.DV}, aoti_dtype(v));
  Tensor k = new_contiguous({p.B, p.N, r.HK, r.DK}, aoti_torch_dtype_float32());
  Tensor u = new_contiguous({p.B, p.N, r.HV, r.DV}, aoti_torch_dtype_float32());
  Tensor g = r.gate == Gate::kChannel ? new_contiguous({p.B, p.N, r.HV, r.DK}, aoti_torch_dtype_float32())
             : r.gate == Gate::kHead  ? new_contiguous({p.B, p.N, r.HV}, aoti_torch_dtype_float32())
                                      : new_contiguous({0}, aoti_torch_dtype_float32());
  p.out = out.mutable_data_ptr();
  p.k_out = static_cast<float*>(k.mutable_data_ptr());
  p.u_out = static_cast<float*>(u.mutable_data_ptr());
  p.g_out = r.gate == Gate::kNone ? nullptr : static_cast<float*>(g.mutable_data_ptr());
  check_status(cpu::verify(p), "verify");
  return {out, k, u, g};
}

Verified verify(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                const OptionalTensor& beta, const Tensor& state, const OptionalTensor& slots,
                const OptionalTensor& parents, const OptionalTensor& lengths, const OptionalTensor& prefix_k,
                const OptionalTensor& prefix_u, const OptionalTensor& prefix_g,
                const OptionalTensor& prefix_parents, std::optional<double> scale, bool qk_l2norm,
                int64_t strategy) {
  VerifyParams p;
  fill_tokens(p, q, k, v, g, beta, scale, qk_l2norm);
  p.B = q.size(0);
  p.N = q.size(1);
  p.strategy = strategy_of(strategy);
  p.has_prefix = prefix_k.has_value();
  if (p.has_prefix) {
    STD_TORCH_CHECK(p.strategy != Strategy::kSolve,
                    "prefix: got a prefix with strategy solve, want serial or hybrid");
    STD_TORCH_CHECK(prefix_u.has_value(), "prefix.factors.u: got None, want a tensor");
    p.prefix = factors_view(*prefix_k, *prefix_u, prefix_g,
                            {"prefix.factors.k", "prefix.factors.u", "prefix.factors.g"}, p.B, p.rec);
  }
  check_node_count(p.strategy, p.N, p.prefix.nodes);
  const Rows rows = fill_tree(p, state, slots, parents, lengths, p.prefix.nodes, Access::kRead);
  if (p.has_prefix) {
    p.prefix_parents = parents_view(prefix_parents, "prefix.parents", rows, p.prefix.nodes, 0, nullptr);
  }
  return run(p, v);
}

Verified verify_deferred(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                         const OptionalTensor& beta, const Tensor& state, const OptionalTensor& slots,
                         const OptionalTensor& parents, const OptionalTensor& lengths,
                         const Tensor& pending_k, const Tensor& pending_u, const OptionalTensor& pending_g,
                         const OptionalTensor& pending_path, const OptionalTensor& pending_path_lengths,
                         std::optional<double> scale, bool qk_l2norm, int64_t strategy) {
  VerifyParams p;
  fill_tokens(p, q, k, v, g, beta, scale, qk_l2norm);
  p.B = q.size(0);
  p.N = q.size(1);
  p.strategy = strategy_of(strategy);
  check_node_count(p.strategy, p.N, 0);
  p.has_pending = true;
  p.pending = factors_view(pending_k, pending_u, pending_g,
                           {"pending.factors.k", "pending.factors.u", "pending.factors.g"}, p.B, p.rec);
  const Rows rows = fill_tree(p, state, slots, parents, lengths, 0, Access::kWrite);
  p.pending_path = path_view(pending_path, pending_path_lengths, "pending.path", "pending.path_lengths", rows,
                             p.pending.nodes);
  return run(p, v);
}

void commit(const Tensor& state, const Tensor& k, const Tensor& u, const OptionalTensor& g,
            const OptionalTensor& path, const OptionalTensor& path_lengths, const OptionalTensor& slots,
            int64_t mode) {
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
  const Rows rows = rows_view(slots, p.B, p.state.slots, "state");
  p.slots = rows.slots;
  p.path = path_view(path, path_lengths, "path", "path_lengths", rows, p.factors.nodes);
  check_status(cpu::commit(p), "commit");
}

// cu_seqlens int32 [sequences + 1]: starts at 0, ascends, ends at the last token.
const int32_t* sequence_ends(const Tensor& cu_seqlens, int64_t tokens) {
  check_dtype(cu_seqlens, "cu_seqlens", ScalarType::Int);
  check_shape(cu_seqlens, "cu_seqlens", {-1}, "[B + 1]");
  check_contiguous(cu_seqlens, "cu_seqlens");
  const int64_t entries = cu_seqlens.size(0);
  STD_TORCH_CHECK(entries >= 1, "cu_seqlens: got no entries, want B + 1");
  const int32_t* ends = static_cast<const int32_t*>(cu_seqlens.const_data_ptr());
  STD_TORCH_CHECK(ends[0] == 0 && ends[entries - 1] == tokens, "cu_seqlens: got ", ends[0], " to ",
                  ends[entries - 1], ", want 0 to the ", tokens, " tokens of q");
  for (int64_t i = 1; i < entries; ++i) {
    STD_TORCH_CHECK(ends[i] >= ends[i - 1], "cu_seqlens: entry ", i, " is ", ends[i], " after ", ends[i - 1],
                    ", want ascending entries");
  }
  return ends;
}

Tensor prefill(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
               const OptionalTensor& beta, const Tensor& state, const OptionalTensor& slots,
               const OptionalTensor& lengths, const OptionalTensor& cu_seqlens, std::optional<double> scale,
               bool qk_l2norm) {
  PrefillParams p;
  fill_tokens(p, q, k, v, g, beta, scale, qk_l2norm);
  p.B = q.size(0);
  p.T = q.size(1);
  if (cu_seqlens.has_value()) {
    STD_TORCH_CHECK(!lengths.has_value(), "lengths: got both lengths and cu_seqlens, want one");
    STD_TORCH_CHECK(p.B == 1, "q: got ", p.B, " rows with cu_seqlens, want packed sequences in one row");
    p.cu_seqlens = sequence_ends(*cu_seqlens, p.T);
    p.B = cu_seqlens->size(0) - 1;
  }
  p.lengths = int32_or_null(lengths, "lengths", {p.B}, "[B]");
  p.state = state_view(state, p.rec, Access::kWrite);
  p.slots = rows_view(slots, p.B, p.state.slots, "state").slots;
  Tensor out = new_contiguous({v.size(0), p.T, p.rec.HV, p.rec.DV}, aoti_dtype(v));
  p.out = out.mutable_data_ptr();
  check_status(cpu::prefill(p), "prefill");
  return out;
}

}  // namespace

}  // namespace specdec::binding

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("verify", TORCH_BOX(&specdec::binding::verify));
  m.impl("verify_deferred", TORCH_BOX(&specdec::binding::verify_deferred));
  m.impl("commit", TORCH_BOX(&specdec::binding::commit));
  m.impl("prefill", TORCH_BOX(&specdec::binding::prefill));
}
