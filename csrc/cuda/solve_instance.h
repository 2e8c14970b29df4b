// What the dispatch of verify_solve and prefill has in common. Params is VerifyParams or PrefillParams.
#pragma once

#include <cstdint>
#include <type_traits>

#include "specdec/params.h"

namespace specdec::cuda {

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

}  // namespace specdec::cuda
