// The gates of one token, all value heads.
#pragma once

#include "rows.h"
#include "simd_math.h"

namespace specdec::cpu::SPECDEC_ISA {

// g [HV] = -exp(A_log) softplus(a + dt_bias), beta [HV] = sigmoid(b), twice that where neg_eigval.
template <typename T>
inline void gates_row(const T* a, const T* b, const float* A_log, const float* dt_bias, bool neg_eigval,
                      int64_t HV, float* g, float* beta) {
  const Vec beta_scale = Vec::set(neg_eigval ? 2.0f : 1.0f);
  for_vectors(HV, [&](int64_t i, int64_t n) {
    const Vec rate = exp(load_some(A_log + i, n));
    const Vec step = softplus(load_some(a + i, n) + load_some(dt_bias + i, n));
    store_some(g + i, Vec::zero() - rate * step, n);
    store_some(beta + i, sigmoid(load_some(b + i, n)) * beta_scale, n);
  });
}

}  // namespace specdec::cpu::SPECDEC_ISA
