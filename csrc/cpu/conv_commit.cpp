// conv_commit: the window of a sequence becomes the last W-1 raw inputs of its accepted path, continued into
// the old window where the path is shorter. A copy: bit-exact by nature.
#include "conv_window.h"
#include "parallel.h"
#include "simd.h"
#include "specdec/sequences.h"

namespace specdec::cpu::SPECDEC_ISA {

Status conv_commit(const ConvCommitParams& p) {
  if (p.W < 2) return Status::kOk;  // width 1 has no memory
  return visit_dtype(p.x.dtype, [&](auto x_tag) {
    return visit_dtype(p.state.dtype, [&](auto state_tag) {
      using X = decltype(x_tag);
      using S = decltype(state_tag);
      parallel_for(p.B, p.B * p.W * p.C, [&](int64_t b) {
        const int64_t slot = slot_of(p.slots, b);
        if (slot < 0) return;
        S* window = static_cast<S*>(p.state.data) + slot * p.state.slot_stride;
        advance_window<X, S>(window, p.x, p.path, b, p.C, p.W);
      });
      return Status::kOk;
    });
  });
}

}  // namespace specdec::cpu::SPECDEC_ISA
