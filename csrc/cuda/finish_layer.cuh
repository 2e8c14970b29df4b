// What a layer does when the tiles of a head are done: the window that moves on, which no block may see
// before it has read it, and the norm of the head's outputs, which wants all of them. The last block to
// arrive does it; nobody waits.
#pragma once

#include "layer_tokens.cuh"

namespace specdec::cuda {

// A launch of the layer. Counters are zero before and after it: [B, HK] blocks that have read their window,
// [B, HV] tiles that are done.
struct LayerCall {
  VerifyLayerParams layer;
  int32_t* counters = nullptr;

  SPECDEC_HOST_DEVICE int64_t counters_count() const {
    const VerifyParams& v = layer.verify;
    return v.B * ((moves_window() ? v.rec.HK : 0) + (layer.has_epilogue ? v.rec.HV : 0));
  }
  SPECDEC_HOST_DEVICE bool moves_window() const {
    return layer.has_prologue && layer.verify.has_pending && layer.prologue.W > 1;
  }
};

template <typename Traits>
class FinishLayer {
  static constexpr int kDK = Traits::kDK, kRows = Traits::kRows, kThreads = Traits::kThreads;

 public:
  static constexpr int64_t kSharedBytes = 16;

  SPECDEC_DEVICE FinishLayer(const LayerCall& call, const Place& at, const Sequence& s, SharedArena& shared)
      : call_(call), p_(call.layer), at_(at), s_(s), last_(shared.take<int32_t>(4)) {}

  // By the whole block when it has read all of its inputs and written all of its outputs.
  SPECDEC_DEVICE void run() const {
    const Recurrence& rec = p_.verify.rec;
    const bool moves = call_.moves_window() && s_.pending > 0;
    if (!moves && !p_.has_epilogue) return;
    const int64_t tiles = rec.DV / kRows, group = rec.HV / rec.HK;
    const Global<int32_t> counters(call_.counters);
    const int64_t heads = call_.moves_window() ? p_.verify.B * rec.HK : 0;  // behind those of the window
    barrier();
    if (thread() == 0) {
      fence();
      last_.store(0, moves && arrive(counters, at_.b * rec.HK + at_.hk, group * tiles));
      last_.store(1, p_.has_epilogue && arrive(counters, heads + at_.b * rec.HV + at_.hv, tiles));
      fence();
    }
    barrier();
    if (moves) {
      const LayerChannels channels(rec, at_.hk, at_.hv);
      // The value rows of the tile are this block's alone.
      for (int c = thread(); c < kRows; c += kThreads) move(channels.v + at_.row + c);
      if (last_.load(0) != 0) {
        for (int c = thread(); c < kDK; c += kThreads) {
          move(channels.q + c);
          move(channels.k + c);
        }
      }
    }
    if (last_.load(1) != 0) norm();
  }

 private:
  SPECDEC_DEVICE static int32_t arrive(const Global<int32_t>& counters, int64_t i, int64_t all) {
    if (counters.atomic_add(i, 1) + 1 < all) return 0;
    counters.atomic_add(i, -static_cast<int32_t>(all));  // for the next launch
    return 1;
  }

  // One channel of the window, from the oldest row on: a row is read before it is overwritten.
  SPECDEC_DEVICE void move(int64_t channel) const {
    const ConvStateView& window = p_.prologue.window;
    const int kept = static_cast<int>(p_.prologue.W) - 1;
    const int64_t C = LayerChannels(p_.verify.rec, 0, 0).count;
    for (int row = 0; row < kept; ++row) {
      const float x = moved_row(p_, at_.b, s_.slot, s_.pending, row).load(channel);
      store_float(window.data, window.dtype, s_.slot * window.slot_stride + row * C + channel, x);
    }
  }

  // All tokens of the head, one a warp.
  SPECDEC_DEVICE void norm() const {
    const VerifyParams& v = p_.verify;
    const LayerEpilogue& e = p_.epilogue;
    const int DV = static_cast<int>(v.rec.DV);
    const Global<const float> weight(e.weight);
    for (int n = warp(); n < s_.length; n += kThreads / 32) {
      const int64_t at = ((at_.b * v.N + n) * v.rec.HV + at_.hv) * v.rec.DV;
      const int64_t gate = at_.b * e.gate_stride.b + n * e.gate_stride.n + at_.hv * e.gate_stride.h;
      float sum = 0.0f;
      for (int c = lane(); c < DV; c += 32) {
        const float x = load_float(v.out, v.dtype, at + c);
        sum = fma(x, x, sum);
      }
      for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
      const float scale = 1.0f / sqrt(sum / static_cast<float>(DV) + e.eps);
      for (int c = lane(); c < DV; c += 32) {
        float y = load_float(v.out, v.dtype, at + c) * scale * weight.load(c);
        if (e.gate != nullptr) {
          const float g = load_float(e.gate, v.dtype, gate + c);
          y = y * (g / (1.0f + exp(-g)));
        }
        store_float(v.out, v.dtype, at + c, y);
      }
    }
  }

  const LayerCall& call_;
  const VerifyLayerParams& p_;
  const Place& at_;
  const Sequence& s_;
  Shared<int32_t> last_;
};

}  // namespace specdec::cuda
