#include "prefill.cuh"

#include "solve.h"
#include "solve_instance.h"

namespace specdec::cuda {

Status prefill(const PrefillParams& p, Stream stream) {
  if (p.lengths != nullptr && p.cu_seqlens != nullptr) return Status::kInvalidArgument;
  const Status status = check_solve(p);
  if (status != Status::kOk) return status;
  // Chunks of 64 tokens where their keys and queries fit beside the state; per channel they are held twice.
  const bool wide = p.rec.DK <= 128;
  return with_precision(p.precision, [&](auto precision) {
    constexpr Precision kPrecision = decltype(precision)::value;
    if (p.rec.gate == Gate::kChannel) {
      return wide ? launch<Prefill<SolveTraits<kPrecision, true, 32>>>(p, stream)
                  : launch<Prefill<SolveTraits<kPrecision, true, 16>>>(p, stream);
    }
    return wide ? launch<Prefill<SolveTraits<kPrecision, false, 64>>>(p, stream)
                : launch<Prefill<SolveTraits<kPrecision, false, 32>>>(p, stream);
  });
}

}  // namespace specdec::cuda
