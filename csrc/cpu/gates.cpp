// gated_delta_gates: the log decay g = -exp(A_log) softplus(a + dt_bias) and the write strength beta =
// sigmoid(b) of a Gated DeltaNet (Yang et al., 2024, arXiv:2412.06464; the decay's form is Mamba-2's).
#include "gates_row.h"
#include "ops.h"
#include "parallel.h"

namespace specdec::cpu::SPECDEC_ISA {

Status gated_delta_gates(const GatesParams& p) {
  return visit_dtype(p.a.dtype, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(p.a.rows, p.a.rows * p.HV * 30, [&](int64_t row) {
      gates_row(row_of<T>(p.a, row), row_of<T>(p.b, row), p.A_log, p.dt_bias, p.neg_eigval, p.HV,
                p.g + row * p.HV, p.beta + row * p.HV);
    });
    return Status::kOk;
  });
}

}  // namespace specdec::cpu::SPECDEC_ISA
