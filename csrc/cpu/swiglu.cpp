// swiglu: y = silu(gate) * up with x = [gate, up] on the last dimension.
#include "ops.h"
#include "parallel.h"
#include "rows.h"
#include "simd_math.h"

namespace specdec::cpu::SPECDEC_ISA {

Status swiglu(const SwigluParams& p) {
  return visit_dtype(p.x.dtype, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(p.x.rows, p.x.rows * p.F * 10, [&](int64_t row) {
      const T* gate = row_of<T>(p.x, row);
      const T* up = gate + p.F;
      T* y = static_cast<T*>(p.y) + row * p.F;
      for_vectors(p.F, [&](int64_t i, int64_t n) {
        store_some(y + i, silu(load_some(gate + i, n)) * load_some(up + i, n), n);
      });
    });
    return Status::kOk;
  });
}

}  // namespace specdec::cpu::SPECDEC_ISA
