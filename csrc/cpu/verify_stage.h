// Per-token numbers that do not depend on the state: keys and queries in float32, their dot, the decays.
// Prepared once a thread and head in front of the passes over the state, so that the hot loop is float32
// alone.
#pragma once

#include "recurrence.h"

namespace specdec::cpu::SPECDEC_ISA {

// One head of one sequence, all new tokens.
struct Stage {
  float* k;      // [N, DK]
  float* q;      // [N, DK], scaled
  float* kq;     // [N]
  float* decay;  // [N, decay_size]
};

namespace detail {

template <typename T>
inline void widen(const T* x, float* out, int64_t n) {
  for (int64_t c = 0; c < n; c += Vec::kWidth) Vec::load(x + c).store(out + c);
}

inline void multiply(float* x, float factor, int64_t n) {
  for (int64_t c = 0; c < n; c += Vec::kWidth) (Vec::load(x + c) * Vec::set(factor)).store(x + c);
}

inline void normalise(float* x, int64_t n) { multiply(x, 1.0f / std::sqrt(dot(x, x, n) + 1e-6f), n); }

}  // namespace detail

// k, q and kq of key head `hk`, tokens [0, length).
template <typename T>
inline void stage_keys(const VerifyParams& p, int64_t b, int64_t hk, int64_t length, const Stage& stage) {
  const int64_t DK = p.rec.DK;
  for (int64_t n = 0; n < length; ++n) {
    float* k = stage.k + n * DK;
    float* q = stage.q + n * DK;
    detail::widen(static_cast<const T*>(p.k) + b * p.k_stride.b + n * p.k_stride.n + hk * p.k_stride.h, k,
                  DK);
    detail::widen(static_cast<const T*>(p.q) + b * p.q_stride.b + n * p.q_stride.n + hk * p.q_stride.h, q,
                  DK);
    if (p.qk_l2norm) {
      detail::normalise(k, DK);
      detail::normalise(q, DK);
    }
    if (p.scale != 1.0f) detail::multiply(q, p.scale, DK);
    stage.kq[n] = dot(k, q, DK);
  }
}

inline const float* gate_of(const VerifyParams& p, int64_t b, int64_t n, int64_t hv) {
  return p.g + b * p.g_stride.b + n * p.g_stride.n + hv * p.g_stride.h;
}

inline void stage_decays(const VerifyParams& p, int64_t b, int64_t hv, int64_t length, const Stage& stage) {
  const int64_t size = decay_size(p.rec);
  if (size == 0) return;
  for (int64_t n = 0; n < length; ++n) decay_of(gate_of(p, b, n, hv), stage.decay + n * size, size);
}

// The factor of `node` in head `hv`; its decay is computed into `decay` [decay_size].
inline Factor stored_factor(const Recurrence& rec, const FactorsView& view, int64_t b, int64_t node,
                            int64_t hv, float* decay) {
  const int64_t at = b * view.nodes + node;
  const int64_t size = decay_size(rec);
  if (size > 0) decay_of(view.g + (at * rec.HV + hv) * size, decay, size);
  const int64_t hk = hv / (rec.HV / rec.HK);
  return Factor{view.u + (at * rec.HV + hv) * rec.DV, view.k + (at * rec.HK + hk) * rec.DK, decay};
}

}  // namespace specdec::cpu::SPECDEC_ISA
