// A layer between its projections in one launch: serial verification whose tokens are made from the raw
// projections as they are staged, and whose last tile of a head norms it. Both parts are optional.
#pragma once

#include "finish_layer.cuh"
#include "verify_serial.cuh"

namespace specdec::cuda {

template <typename Traits>
struct VerifyLayer {
  using Params = LayerCall;
  static constexpr int kThreads = Traits::kThreads;

  static Launch shape(const Params& p) {
    Launch launch = VerifySerial<Traits>::shape(p.layer.verify);
    launch.shared_bytes += LayerTokens<Traits>::kSharedBytes + FinishLayer<Traits>::kSharedBytes;
    return launch;
  }

  SPECDEC_DEVICE static void run(const Params& p, SharedArena shared) {
    const VerifyParams& v = p.layer.verify;
    const Place at = Place::of<Traits::kRows>(v.rec, block().x);
    Sequence s = Sequence::of(v, at.b);
    if (p.layer.has_prologue && s.slot >= p.layer.prologue.window.slots) s = Sequence();
    clear_padding<Traits>(v, at, s.length);
    if (s.length == 0 && s.pending == 0) return;
    const FinishLayer<Traits> finish(p, at, s, shared);
    verify_tile<Traits>(v, at, s, LayerTokens<Traits>(p.layer, at, s, shared), shared);
    finish.run();
  }
};

}  // namespace specdec::cuda
