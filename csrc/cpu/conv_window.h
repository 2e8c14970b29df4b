// The sliding window of a short causal convolution.
#pragma once

#include <algorithm>
#include <type_traits>

#include "simd.h"
#include "specdec/params.h"
#include "specdec/sequences.h"

namespace specdec::cpu::SPECDEC_ISA {

// window [W-1, C] <- the last W-1 of (old window, accepted inputs of row b), oldest first.
template <typename X, typename S>
inline void advance_window(S* window, const ConvInputView& in, const PathView& path, int64_t b, int64_t C,
                           int64_t W) {
  const int64_t accepted = path_length(path, b, in.nodes);
  const int64_t kept = std::max<int64_t>(0, W - 1 - accepted);  // rows of the old window that survive
  if (accepted > 0 && kept > 0) std::memmove(window, window + accepted * C, kept * C * sizeof(S));
  for (int64_t row = kept; row < W - 1; ++row) {
    const int64_t node = path_node(path, b, accepted - (W - 1 - row));
    const X* x = static_cast<const X*>(in.x) + b * in.stride_b + node * in.stride_n;
    if constexpr (std::is_same_v<X, S>) {
      std::memcpy(window + row * C, x, C * sizeof(S));
    } else {
      for (int64_t c = 0; c < C; ++c) window[row * C + c] = from_float<S>(to_float(x[c]));
    }
  }
}

}  // namespace specdec::cpu::SPECDEC_ISA
