// rms_norm: one row a work item.
#include "ops.h"
#include "parallel.h"
#include "row_ops.h"

namespace specdec::cpu::SPECDEC_ISA {

Status rms_norm(const RmsNormParams& p) {
  return visit_dtype(p.x.dtype, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(p.x.rows, p.x.rows * p.D * (p.has_gate ? 12 : 4), [&](int64_t row) {
      const T* gate = p.has_gate ? row_of<T>(p.gate, row) : nullptr;
      rms_norm_row(row_of<T>(p.x, row), gate, p.weight, p.eps, p.D, static_cast<T*>(p.y) + row * p.D);
    });
    return Status::kOk;
  });
}

}  // namespace specdec::cpu::SPECDEC_ISA
