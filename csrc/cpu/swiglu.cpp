// swiglu: one row a work item.
#include "ops.h"
#include "parallel.h"
#include "row_ops.h"

namespace specdec::cpu::SPECDEC_ISA {

Status swiglu(const SwigluParams& p) {
  return visit_dtype(p.x.dtype, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(p.x.rows, p.x.rows * p.F * 10, [&](int64_t row) {
      swiglu_row(row_of<T>(p.x, row), p.F, static_cast<T*>(p.y) + row * p.F);
    });
    return Status::kOk;
  });
}

}  // namespace specdec::cpu::SPECDEC_ISA
