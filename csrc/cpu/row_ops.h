// The row-wise ops on one row. T is the input's type, Y that of the result: the ops themselves store what
// they read, `linear` takes float32 rows where one of them runs on its input.
#pragma once

#include "rows.h"
#include "simd_math.h"

namespace specdec::cpu::SPECDEC_ISA {

template <typename T>
inline float sum_of_squares(const T* x, int64_t D) {
  constexpr int kSums = 4;  // independent, to hide the latency of the additions
  Vec sums[kSums] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
  for_vectors(D, [&](int64_t i, int64_t n) {
    const Vec v = load_some(x + i, n);
    Vec& sum = sums[i / Vec::kWidth % kSums];
    sum = fma(v, v, sum);
  });
  return hsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// y [D] = x * rsqrt(mean(x^2) + eps) * weight, times silu(gate) where given; the order of the sum depends on
// D alone.
template <typename T, typename Y>
inline void rms_norm_row(const T* x, const T* gate, const float* weight, float eps, int64_t D, Y* y) {
  const float mean = sum_of_squares(x, D) / static_cast<float>(D);
  const Vec scale = Vec::set(1.0f / std::sqrt(mean + eps));
  if (gate == nullptr) {
    for_vectors(D, [&](int64_t i, int64_t n) {
      store_some(y + i, load_some(x + i, n) * scale * load_some(weight + i, n), n);
    });
    return;
  }
  for_vectors(D, [&](int64_t i, int64_t n) {
    const Vec normed = load_some(x + i, n) * scale * load_some(weight + i, n);
    store_some(y + i, normed * silu(load_some(gate + i, n)), n);
  });
}

// y [F] = silu(x[0:F]) * x[F:2F].
template <typename T, typename Y>
inline void swiglu_row(const T* x, int64_t F, Y* y) {
  for_vectors(F, [&](int64_t i, int64_t n) {
    store_some(y + i, silu(load_some(x + i, n)) * load_some(x + F + i, n), n);
  });
}

}  // namespace specdec::cpu::SPECDEC_ISA
