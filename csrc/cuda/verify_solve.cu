#include "solve.h"
#include "solve_instance.h"
#include "verify_solve.cuh"

namespace specdec::cuda {

Status verify_solve(const VerifyParams& p, Stream stream) {
  if (p.has_prefix || p.N > kMaxSolveNodes) return Status::kUnsupported;
  const Status status = check_solve(p);
  if (status != Status::kOk) return status;
  const bool channel = p.rec.gate == Gate::kChannel;
  // More rows share the Gram matrices and the coefficients, but must leave room for the state.
  const bool wide = p.N > 16 && (p.rec.DK <= 128 || (p.N <= 32 && !channel));
  return with_precision(p.precision, [&](auto precision) {
    constexpr Precision kPrecision = decltype(precision)::value;
    if (channel) {
      return wide ? launch<VerifySolve<SolveTraits<kPrecision, true, 32>>>(p, stream)
                  : launch<VerifySolve<SolveTraits<kPrecision, true, 16>>>(p, stream);
    }
    return wide ? launch<VerifySolve<SolveTraits<kPrecision, false, 32>>>(p, stream)
                : launch<VerifySolve<SolveTraits<kPrecision, false, 16>>>(p, stream);
  });
}

}  // namespace specdec::cuda
