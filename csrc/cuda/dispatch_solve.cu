// Which instances of the solve exist, and which one a call of verify_solve or prefill takes.
#include <type_traits>

#include "ops.h"
#include "prefill.cuh"
#include "verify_solve.cuh"

namespace specdec::cuda {

namespace {

// Refuses what no instance of the solve can run.
template <typename Params>
Status check_solve(const Params& p) {
  const Recurrence& rec = p.rec;
  if (rec.HK <= 0 || rec.HV % rec.HK != 0) return Status::kInvalidArgument;
  if ((rec.gate == Gate::kNone) != (p.g == nullptr)) return Status::kInvalidArgument;
  if ((rec.update == Update::kDelta) != (p.beta != nullptr)) return Status::kInvalidArgument;
  if (rec.DK <= 0 || rec.DK > 256 || rec.DK % 32 != 0 || rec.DV % 32 != 0) return Status::kUnsupported;
  if (p.state.dtype == DType::kFloat16) return Status::kUnsupported;
  const int64_t size = p.state.dtype == DType::kFloat32 ? 4 : 2;
  if (reinterpret_cast<uintptr_t>(p.state.data) % 16 != 0 || p.state.slot_stride * size % 16 != 0) {
    return Status::kUnsupported;
  }
  if (p.B * rec.HV * (rec.DV / 32) > INT32_MAX) return Status::kUnsupported;  // the blocks of a grid
  return Status::kOk;
}

// f(constant) with the precision as a constant; there is no IEEE arithmetic on tensor cores.
template <typename F>
Status with_precision(Precision precision, const F& f) {
  switch (precision) {
    case Precision::kTf32x3:
      return f(std::integral_constant<Precision, Precision::kTf32x3>{});
    case Precision::kTf32:
      return f(std::integral_constant<Precision, Precision::kTf32>{});
    case Precision::kBf16:
      return f(std::integral_constant<Precision, Precision::kBf16>{});
    case Precision::kIeee:
      break;
  }
  return Status::kUnsupported;
}

}  // namespace

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
