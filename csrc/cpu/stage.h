// What every form of the recurrence reads before the state is asked, in float32: keys and queries as the
// recurrence uses them, decays, betas, stored factors. Prepared once a thread and head, so that the hot loops
// are float32 alone. Params is VerifyParams or PrefillParams.
#pragma once

#include "recurrence.h"
#include "rows.h"

namespace specdec::cpu::SPECDEC_ISA {

inline int64_t at_token(const Strides& s, int64_t b, int64_t n, int64_t h) {
  return b * s.b + n * s.n + h * s.h;
}

namespace detail {

inline void multiply(float* x, float factor, int64_t n) {
  for (int64_t c = 0; c < n; c += Vec::kWidth) (Vec::load(x + c) * Vec::set(factor)).store(x + c);
}

inline void normalise(float* x, int64_t n) { multiply(x, 1.0f / std::sqrt(dot(x, x, n) + 1e-6f), n); }

}  // namespace detail

// k and q [n, DK] of key head hk, tokens [first, first + n) of row b.
template <typename Params>
inline void stage_rows(const Params& p, int64_t b, int64_t first, int64_t n, int64_t hk, float* k, float* q) {
  const int64_t DK = p.rec.DK;
  for (int64_t i = 0; i < n; ++i, k += DK, q += DK) {
    widen_row(p.dtype, p.k, at_token(p.k_stride, b, first + i, hk), DK, k);
    widen_row(p.dtype, p.q, at_token(p.q_stride, b, first + i, hk), DK, q);
    if (p.qk_l2norm) {
      detail::normalise(k, DK);
      detail::normalise(q, DK);
    }
    if (p.scale != 1.0f) detail::multiply(q, p.scale, DK);
  }
}

// decay [n, decay_size] of value head hv.
template <typename Params>
inline void stage_decays(const Params& p, int64_t b, int64_t first, int64_t n, int64_t hv, float* decay) {
  const int64_t size = decay_size(p.rec);
  if (size == 0) return;
  for (int64_t i = 0; i < n; ++i) {
    decay_of(p.g + at_token(p.g_stride, b, first + i, hv), decay + i * size, size);
  }
}

template <typename Params>
inline void stage_betas(const Params& p, int64_t b, int64_t first, int64_t n, int64_t hv, float* beta) {
  if (p.rec.update != Update::kDelta) return;
  for (int64_t i = 0; i < n; ++i) beta[i] = p.beta[at_token(p.beta_stride, b, first + i, hv)];
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
