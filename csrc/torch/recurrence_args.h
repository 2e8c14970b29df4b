// Checked arguments that the recurrences share: tokens (q, k, v, g, beta) and the state pool.
#pragma once

#include <cmath>
#include <tuple>

#include "backend.h"
#include "views.h"

namespace specdec::binding {

inline void check_widths(int64_t DK, int64_t DV, const char* k_name = "k", const char* v_name = "v") {
  STD_TORCH_CHECK(DK == 32 || DK == 64 || DK == 96 || DK == 128 || DK == 192 || DK == 256, k_name,
                  ": got DK = ", DK, ", want 32, 64, 96, 128, 192 or 256");
  STD_TORCH_CHECK(DV >= 32 && DV <= 512 && DV % 32 == 0, v_name, ": got DV = ", DV,
                  ", want a multiple of 32 up to 512");
}

inline void check_heads(int64_t HK, int64_t HV) {
  STD_TORCH_CHECK(HK >= 1 && HV >= 1 && HV % HK == 0, "v: got ", HV, " value heads, want a multiple of the ",
                  HK, " key heads");
}

// Tensor cores do the products of `solve` and of prefill, where there are any; all else is float32
// arithmetic.
inline Precision precision_of(int64_t code, bool solve) {
  const bool wanted = solve && on_tensor_cores();
  STD_TORCH_CHECK(wanted ? code >= 1 && code <= 3 : code == 0, "precision: got ", code, ", want ",
                  wanted ? "1 (tf32x3), 2 (tf32) or 3 (bf16)" : "0 (ieee)");
  return static_cast<Precision>(code);
}

inline Strides strides_of(const Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2)}; }

// g [B, N, HV] or [B, N, HV, DK]; `name` is the argument's.
inline Gate gate_of(const OptionalTensor& g, const char* name, int64_t B, int64_t N, int64_t HV, int64_t DK) {
  if (!g.has_value()) return Gate::kNone;
  check_dtype(*g, name, ScalarType::Float);
  if (g->dim() == 4) {
    check_shape(*g, name, {B, N, HV, DK}, "[B, N, HV, DK]");
    return Gate::kChannel;
  }
  check_shape(*g, name, {B, N, HV}, "[B, N, HV]");
  return Gate::kHead;
}

// A kind of gate in error messages.
inline const char* gate_kind(Gate gate) {
  return gate == Gate::kNone ? "none" : gate == Gate::kHead ? "per head" : "per channel";
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
    p.g = present<float>(*g);
    p.g_stride = strides_of(*g);
  }
  if (beta.has_value()) {
    check_dtype(*beta, "beta", ScalarType::Float);
    check_shape(*beta, "beta", {B, N, HV}, "[B, N, HV]");
    check_last_contiguous(*beta, "beta");
    p.beta = present<float>(*beta);
    p.beta_stride = strides_of(*beta);
  }
  p.scale = static_cast<float>(scale.has_value() ? *scale : 1.0 / std::sqrt(static_cast<double>(DK)));
  p.qk_l2norm = qk_l2norm;
}

inline StateView state_view(const Tensor& state, const Recurrence& rec, Access access) {
  check_shape(state, "state", {-1, rec.HV, rec.DV, rec.DK}, "[S, HV, DV, DK]");
  STD_TORCH_CHECK(state.scalar_type() == ScalarType::Float || state.scalar_type() == ScalarType::BFloat16,
                  "state: got dtype ", torch::headeronly::toString(state.scalar_type()),
                  ", want float32 or bfloat16");
  check_pool(state, "state", access);
  return {pool_data(state, access), float_dtype(state, "state"), state.size(0), state.stride(0)};
}

// Names of one group of factors in error messages.
struct FactorNames {
  const char *k, *u, *g;
};

inline FactorsView factors_view(const Tensor& k, const Tensor& u, const OptionalTensor& g,
                                const FactorNames& names, int64_t B, const Recurrence& rec) {
  check_shape(k, names.k, {B, -1, rec.HK, rec.DK}, "[B, N, HK, DK]");
  const int64_t N = k.size(1);
  check_shape(u, names.u, {B, N, rec.HV, rec.DV}, "[B, N, HV, DV]");
  check_dtype(k, names.k, ScalarType::Float);
  check_dtype(u, names.u, ScalarType::Float);
  check_contiguous(k, names.k);
  check_contiguous(u, names.u);
  const Gate gate = gate_of(g, names.g, B, N, rec.HV, rec.DK);
  STD_TORCH_CHECK(gate == rec.gate, names.g, ": got ", gate_kind(gate), ", want ", gate_kind(rec.gate));
  if (g.has_value()) check_contiguous(*g, names.g);
  return {present<float>(k), present<float>(u), g.has_value() ? present<float>(*g) : nullptr, N};
}

inline void check_node_count(Strategy strategy, int64_t N, int64_t prefix, const char* name = "q") {
  const int64_t most = strategy == Strategy::kSolve ? kMaxSolveNodes : kMaxSerialNodes;
  STD_TORCH_CHECK(N + prefix <= most, name, ": got ", N, " new nodes and ", prefix,
                  " prefix nodes, want at most ", most, " in all with strategy ",
                  strategy == Strategy::kSolve ? "solve" : "serial or hybrid");
}

inline Strategy strategy_of(int64_t code) {
  STD_TORCH_CHECK(code >= 0 && code <= 2, "strategy: got ", code,
                  ", want 0 (serial), 1 (hybrid) or 2 (solve)");
  return static_cast<Strategy>(code);
}

using Verified = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // out, factors k, u, g

// What a verification returns, set in p; out has torch's `dtype`. Without gate g is an empty [0] tensor.
inline Verified new_outputs(VerifyParams& p, const Device& device, int32_t dtype) {
  const Recurrence& r = p.rec;
  const int32_t float32 = aoti_torch_dtype_float32();
  Tensor out = new_contiguous(device, {p.B, p.N, r.HV, r.DV}, dtype);
  Tensor k = new_contiguous(device, {p.B, p.N, r.HK, r.DK}, float32);
  Tensor u = new_contiguous(device, {p.B, p.N, r.HV, r.DV}, float32);
  Tensor g = r.gate == Gate::kChannel ? new_contiguous(device, {p.B, p.N, r.HV, r.DK}, float32)
             : r.gate == Gate::kHead  ? new_contiguous(device, {p.B, p.N, r.HV}, float32)
                                      : new_contiguous(device, {0}, float32);
  p.out = out.mutable_data_ptr();
  p.k_out = static_cast<float*>(k.mutable_data_ptr());
  p.u_out = static_cast<float*>(u.mutable_data_ptr());
  p.g_out = r.gate == Gate::kNone ? nullptr : static_cast<float*>(g.mutable_data_ptr());
  return {out, k, u, g};
}

}  // namespace specdec::binding
