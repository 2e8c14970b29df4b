// What a verification writes besides u and out of its valid nodes: the factors k and g, and zeros in padding.
#pragma once

#include "stage.h"

namespace specdec::cpu::SPECDEC_ISA {

// to [count] <- from, or zeros for a row of padding, which is not read.
inline void copy_or_clear(bool valid, const float* from, int64_t count, float* to) {
  if (valid) {
    std::memcpy(to, from, count * sizeof(float));
  } else {
    std::memset(to, 0, count * sizeof(float));
  }
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
