// What every form of the recurrence does before the state is asked: rows of any type to float32 and back,
// keys and queries as the recurrence uses them, decays, stored factors. Prepared once a thread and head, so
// that the hot loops are float32 alone. Params is VerifyParams or PrefillParams.
#pragma once

#include "recurrence.h"

namespace specdec::cpu::SPECDEC_ISA {

// --- rows of any type ---

// x [count] -> out, in float32.
inline void widen_row(DType dtype, const void* x, int64_t offset, int64_t count, float* out) {
  visit_dtype(dtype, [&](auto tag) {
    const auto* from = static_cast<const decltype(tag)*>(x) + offset;
    int64_t c = 0;
    for (; c + Vec::kWidth <= count; c += Vec::kWidth) Vec::load(from + c).store(out + c);
    for (; c < count; ++c) out[c] = to_float(from[c]);
  });
}

// out [count] <- x, rounded to its type.
inline void narrow_row(DType dtype, const float* x, int64_t count, void* out, int64_t offset) {
  visit_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    T* to = static_cast<T*>(out) + offset;
    int64_t c = 0;
    for (; c + Vec::kWidth <= count; c += Vec::kWidth) store(to + c, Vec::load(x + c));
    for (; c < count; ++c) to[c] = from_float<T>(x[c]);
  });
}

inline void clear_row(DType dtype, int64_t count, void* out, int64_t offset) {
  const int64_t size = dtype == DType::kFloat32 ? 4 : 2;
  std::memset(static_cast<char*>(out) + offset * size, 0, count * size);
}

// to [count] <- from, or zeros for a row of padding, which is not read.
inline void copy_or_clear(bool valid, const float* from, int64_t count, float* to) {
  if (valid) {
    std::memcpy(to, from, count * sizeof(float));
  } else {
    std::memset(to, 0, count * sizeof(float));
  }
}

// --- tokens ---

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

// Factors of row b that do not depend on the value row, padding beyond n tokens cleared: k_out from the
// staged keys [n, DK] where hv is the first value head of its key head, g_out from g.
inline void write_head_factors(const VerifyParams& p, int64_t b, int64_t n, int64_t hv, const float* keys) {
  const Recurrence& rec = p.rec;
  const int64_t group = rec.HV / rec.HK, size = decay_size(rec);
  for (int64_t i = 0; i < p.N; ++i) {
    const int64_t token = b * p.N + i;
    if (hv % group == 0) {
      copy_or_clear(i < n, keys + i * rec.DK, rec.DK, p.k_out + (token * rec.HK + hv / group) * rec.DK);
    }
    if (size > 0) {
      copy_or_clear(i < n, p.g + at_token(p.g_stride, b, i, hv), size,
                    p.g_out + (token * rec.HV + hv) * size);
    }
  }
}

// Value rows [row, row + rows) of the padding tokens [n, N) in u_out and out.
inline void clear_padding(const VerifyParams& p, int64_t b, int64_t n, int64_t hv, int64_t row,
                          int64_t rows) {
  for (int64_t i = n; i < p.N; ++i) {
    const int64_t at = ((b * p.N + i) * p.rec.HV + hv) * p.rec.DV + row;
    std::memset(p.u_out + at, 0, rows * sizeof(float));
    clear_row(p.dtype, rows, p.out, at);
  }
}

}  // namespace specdec::cpu::SPECDEC_ISA
