// gated_delta_gates: the log decay g = -exp(A_log) softplus(a + dt_bias) and the write strength beta =
// sigmoid(b) of a Gated DeltaNet (Yang et al., 2024, arXiv:2412.06464; the decay's form is Mamba-2's).
#include "ops.h"
#include "parallel.h"
#include "rows.h"
#include "simd_math.h"

namespace specdec::cpu::SPECDEC_ISA {

Status gated_delta_gates(const GatesParams& p) {
  const Vec beta_scale = Vec::set(p.neg_eigval ? 2.0f : 1.0f);
  return visit_dtype(p.a.dtype, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(p.a.rows, p.a.rows * p.HV * 30, [&](int64_t row) {
      const T* a = row_of<T>(p.a, row);
      const T* b = row_of<T>(p.b, row);
      for_vectors(p.HV, [&](int64_t i, int64_t n) {
        const Vec rate = exp(load_some(p.A_log + i, n));
        const Vec step = softplus(load_some(a + i, n) + load_some(p.dt_bias + i, n));
        store_some(p.g + row * p.HV + i, Vec::zero() - rate * step, n);
        store_some(p.beta + row * p.HV + i, sigmoid(load_some(b + i, n)) * beta_scale, n);
      });
    });
    return Status::kOk;
  });
}

}  // namespace specdec::cpu::SPECDEC_ISA
