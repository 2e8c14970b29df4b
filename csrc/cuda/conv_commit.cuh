// conv_commit: the window of a sequence becomes the last W-1 raw inputs of its accepted path, continued into
// the old window where the path is shorter. A copy: bit-exact by nature.
//
// A thread owns 16 bytes of a window row, all rows of it: nothing is shared, and the window is read once
// where it survives and written once. A path of length 0 touches nothing.
#pragma once

#include "conv_window.cuh"

namespace specdec::cuda {

template <typename Traits>
struct ConvCommit {
  using Params = ConvCommitParams;
  using X = typename Traits::X;
  using S = typename Traits::S;
  static constexpr int kThreads = 128;
  static constexpr int kVec = Traits::kVector ? 16 / static_cast<int>(sizeof(S)) : 1;  // channels of a thread

  SPECDEC_HOST_DEVICE static int64_t tiles(const Params& p) {
    return (p.C + kThreads * kVec - 1) / (kThreads * kVec);
  }

  static Launch shape(const Params& p) {
    const int64_t blocks = p.B * tiles(p);
    return {{blocks <= INT32_MAX ? static_cast<int32_t>(blocks) : -1, 1, 1}, 0};
  }

  SPECDEC_DEVICE static void run(const Params& p, SharedArena) {
    const int32_t count = static_cast<int32_t>(tiles(p));
    const int64_t b = block().x / count;
    const int64_t c = (static_cast<int64_t>(block().x % count) * kThreads + thread()) * kVec;
    const int64_t slot = slot_of(p.slots, b, p.state.slots);
    if (slot < 0 || c >= p.C) return;
    WindowAdvance<X, S> move(p.state, slot);
    move.accept(p.x, p.path, b);
    if (move.accepted == 0) return;
    const int width = Traits::kWidth > 0 ? Traits::kWidth : static_cast<int>(p.W);
    move.template columns<kVec>(c, p.C, width, [](int, const Pack<S, kVec>&) {});
  }
};

}  // namespace specdec::cuda
