// rms_norm: y = x * rsqrt(mean(x^2) + eps) * weight, times silu(gate) where given. Float32 inside; the order
// of the sum depends on D alone.
#include "ops.h"
#include "parallel.h"
#include "rows.h"
#include "simd_math.h"

namespace specdec::cpu::SPECDEC_ISA {

namespace {

template <typename T>
float sum_of_squares(const T* x, int64_t D) {
  constexpr int kSums = 4;  // independent, to hide the latency of the additions
  Vec sums[kSums] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
  for_vectors(D, [&](int64_t i, int64_t n) {
    const Vec v = load_some(x + i, n);
    Vec& sum = sums[i / Vec::kWidth % kSums];
    sum = fma(v, v, sum);
  });
  return hsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

}  // namespace

Status rms_norm(const RmsNormParams& p) {
  return visit_dtype(p.x.dtype, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(p.x.rows, p.x.rows * p.D * (p.has_gate ? 12 : 4), [&](int64_t row) {
      const T* x = row_of<T>(p.x, row);
      T* y = static_cast<T*>(p.y) + row * p.D;
      const float mean = sum_of_squares(x, p.D) / static_cast<float>(p.D);
      const Vec scale = Vec::set(1.0f / std::sqrt(mean + p.eps));
      if (!p.has_gate) {
        for_vectors(p.D, [&](int64_t i, int64_t n) {
          store_some(y + i, load_some(x + i, n) * scale * load_some(p.weight + i, n), n);
        });
        return;
      }
      const T* gate = row_of<T>(p.gate, row);
      for_vectors(p.D, [&](int64_t i, int64_t n) {
        const Vec normed = load_some(x + i, n) * scale * load_some(p.weight + i, n);
        store_some(y + i, normed * silu(load_some(gate + i, n)), n);
      });
    });
    return Status::kOk;
  });
}

}  // namespace specdec::cpu::SPECDEC_ISA
