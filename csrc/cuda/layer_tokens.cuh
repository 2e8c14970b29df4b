// Tokens of a layer whose verification starts at the raw projections: the warps that stage a token convolve
// its channels on the way to shared memory, rounded to the dtype as conv_verify rounds them, and make its
// gates. The window is only read here, what is pending is taken from the pending inputs: finish_layer.cuh
// moves the window.
#pragma once

#include "layer_limits.h"
#include "specdec/layer_params.h"
#include "stepper.cuh"

namespace specdec::cuda {

// Memory of one input row [C], or of a row of the window.
struct InputRow {
  const void* data = nullptr;
  int64_t at = 0;  // of channel 0
  DType dtype = DType::kFloat32;

  SPECDEC_DEVICE float load(int64_t channel) const { return load_float(data, dtype, at + channel); }
};

// Row `row` of the window [W-1, C] after the pending inputs have moved it: an old row, or an input.
SPECDEC_DEVICE InputRow moved_row(const VerifyLayerParams& p, int64_t b, int64_t slot, int accepted,
                                  int row) {
  const LayerPrologue& from = p.prologue;
  const int old = row + accepted, kept = static_cast<int>(from.W) - 1;
  if (old < kept) {
    const int64_t C = LayerChannels(p.verify.rec, 0, 0).count;
    return {from.window.data, slot * from.window.slot_stride + old * C, from.window.dtype};
  }
  const PathView& path = p.verify.pending_path;
  const int64_t step = old - kept;
  const int64_t node =
      path.path != nullptr
          ? path_node(Global<const int32_t>(path.path).load(b * path.max_length + step), from.pending.nodes)
          : step;
  return {from.pending.x, b * from.pending.stride_b + node * from.pending.stride_n, from.pending.dtype};
}

template <typename Traits>
class LayerTokens {
  static constexpr int kDK = Traits::kDK, kRows = Traits::kRows;
  static constexpr int kChannels = 2 * kDK + kRows;  // of the block: q, k, rows of v
  static constexpr int kTapStride = kChannels + 8;   // weights of a tap apart: no two lanes that fill meet
  static_assert(kChannels % 32 == 0);

 public:
  static constexpr int64_t kSharedBytes = int64_t{kTapStride} * (kLayerTaps + 1) * sizeof(float);

  // By the whole block; the barrier comes with the first tokens.
  SPECDEC_DEVICE LayerTokens(const VerifyLayerParams& p, const Place& at, const Sequence& s,
                             SharedArena& shared)
      : p_(p),
        s_(s),
        channels_(p.verify.rec, at.hk, at.hv),
        row_(at.row),
        taps_(shared.take<float>(kTapStride * (kLayerTaps + 1))) {
    if (!p.has_prologue) return;
    const LayerPrologue& from = p.prologue;
    const int W = static_cast<int>(from.W);
    const Global<const float> weight(from.weight), bias(from.bias);
    for (int i = thread(); i < kChannels * W; i += Traits::kThreads) {
      taps_.store(i % W * kTapStride + i / W, weight.load(channel(i / W) * W + i % W));
    }
    for (int i = thread(); i < kChannels; i += Traits::kThreads) {
      taps_.store(kLayerTaps * kTapStride + i, bias ? bias.load(channel(i)) : 0.0f);
    }
  }

  template <typename Stage>
  SPECDEC_DEVICE void copy(const Stage& stage, const VerifyParams& p, const Place& at, int bank, int i,
                           int part, int64_t n) const {
    if (!p_.has_prologue) return stage.copy_new(p, at, bank, i, part, n);
    if (part == 0) {
      convolve(at.b, n, kDK, kDK, stage.raw_k(bank, i));
    } else if (part == 1) {
      convolve(at.b, n, 0, kDK, stage.raw_q(bank, i));
    } else if (part == 2) {
      convolve(at.b, n, 2 * kDK, kRows, stage.v(bank, i));
    } else if (lane() == 0) {
      make_gates(at, n, stage.gates(bank, i));
    }
  }

 private:
  // Channel i of the block among the C.
  SPECDEC_DEVICE int64_t channel(int i) const {
    return i < kDK ? channels_.q + i : i < 2 * kDK ? channels_.k + i - kDK : channels_.v + row_ + i - 2 * kDK;
  }

  SPECDEC_DEVICE int64_t parent(int64_t b, int id, int64_t prefix) const {
    const VerifyParams& v = p_.verify;
    const int32_t* parents = id < prefix ? v.prefix_parents : v.parents;
    if (parents == nullptr) return id - 1;
    return parent_of(
        Global<const int32_t>(parents).load(id < prefix ? b * prefix + id : b * v.N + id - prefix), id);
  }

  // `count` channels of the block from `first` on, by a warp.
  SPECDEC_DEVICE void convolve(int64_t b, int64_t n, int first, int count, const RawRow& to) const {
    const VerifyParams& v = p_.verify;
    const LayerPrologue& from = p_.prologue;
    const int W = static_cast<int>(from.W);
    const int64_t prefix = v.has_prefix ? v.prefix.nodes : 0;
    InputRow rows[kLayerTaps];  // newest first
    int64_t id = prefix + n;    // below 0: -1 for the newest row of the window, -2 for the one before
    SPECDEC_UNROLL
    for (int t = 0; t < kLayerTaps; ++t) {
      if (t >= W) continue;
      if (id < 0) {
        rows[t] = moved_row(p_, b, s_.slot, s_.pending, W - 1 + static_cast<int>(id));
        --id;
      } else {
        const ConvInputView& in = id < prefix ? from.prefix : from.mixed;
        rows[t] = {in.x, b * in.stride_b + (id < prefix ? id : id - prefix) * in.stride_n, in.dtype};
        if (t + 1 < W) id = parent(b, static_cast<int>(id), prefix);
      }
    }
    for (int c = lane(); c < count; c += 32) {
      const int i = first + c;
      const int64_t from_channel = channel(i);
      float sum = taps_.load(kLayerTaps * kTapStride + i);
      SPECDEC_UNROLL
      for (int t = kLayerTaps - 1; t >= 0; --t) {
        if (t < W) sum = fma(taps_.load((W - 1 - t) * kTapStride + i), rows[t].load(from_channel), sum);
      }
      to.store(v.dtype, c, sum / (1.0f + exp(-sum)));
    }
  }

  // {g, beta} of the head.
  SPECDEC_DEVICE void make_gates(const Place& at, int64_t n, const Shared<float>& to) const {
    const LayerPrologue& from = p_.prologue;
    const DType dtype = p_.verify.dtype;
    const float a = load_float(from.a, dtype, at.b * from.a_stride.b + n * from.a_stride.n + at.hv);
    const float b = load_float(from.b, dtype, at.b * from.b_stride.b + n * from.b_stride.n + at.hv);
    const float x = a + Global<const float>(from.dt_bias).load(at.hv);
    const float softplus = (x > 0.0f ? x : 0.0f) + log1p(exp(x > 0.0f ? -x : x));
    to.store(0, -exp(Global<const float>(from.A_log).load(at.hv)) * softplus);
    to.store(1, (from.neg_eigval ? 2.0f : 1.0f) / (1.0f + exp(-b)));
  }

  const VerifyLayerParams& p_;
  const Sequence& s_;
  LayerChannels channels_;
  int row_;
  Shared<float> taps_;  // [kLayerTaps, kTapStride] by tap, the newest input last, then biases
};

}  // namespace specdec::cuda
