// One launch for a layer of Gated DeltaNet between its projections: verification with what comes before it
// (short convolution, SiLU, gates) and what comes after it (gated norm of a head). Each of the two is
// optional.
#pragma once

#include "specdec/params.h"

namespace specdec {

// Makes q, k, v, g and beta from the raw projections. The channels are those of q, k and v, head by head: C =
// 2 HK DK + HV DV. Pending and prefix nodes, paths, slots, parents and lengths are those of the verification.
struct LayerPrologue {
  ConvInputView mixed;            // [B, N, C], dtype of the verification
  int64_t W = 0;                  // taps
  const float* weight = nullptr;  // [C, W] contiguous, the newest input last
  const float* bias = nullptr;    // [C]
  ConvStateView window;           // read; moved on where the verification has pending factors
  ConvInputView pending, prefix;  // raw inputs of the pending and of the prefix nodes

  const void* a = nullptr;  // [B, N, HV], dtype of the verification
  const void* b = nullptr;
  Strides a_stride, b_stride;  // heads are contiguous
  // g = -exp(A_log) * softplus(a + dt_bias), beta = sigmoid(b), twice that where neg_eigval.
  const float* A_log = nullptr;    // [HV]
  const float* dt_bias = nullptr;  // [HV]
  bool neg_eigval = false;
};

// out <- out * rsqrt(mean(out^2) + eps) * weight over a head, times silu(gate) where given. `out` is rounded
// to its dtype before and after.
struct LayerEpilogue {
  const float* weight = nullptr;  // [DV]
  float eps = 0.0f;
  const void* gate = nullptr;  // [B, N, HV, DV], dtype of the verification
  Strides gate_stride;
};

// Serial or hybrid. With a prologue, `verify` has a gate per head and the delta rule, and its q, k, v, g and
// beta are null; what the convolution gives is rounded to the dtype, as a conv_verify before it would.
struct VerifyLayerParams {
  VerifyParams verify;
  bool has_prologue = false;
  LayerPrologue prologue;
  bool has_epilogue = false;
  LayerEpilogue epilogue;
};

// The channels of q, k and v of head h among the C.
struct LayerChannels {
  int64_t q = 0, k = 0, v = 0, count = 0;  // first channels; C

  constexpr LayerChannels(const Recurrence& r, int64_t hk, int64_t hv)
      : q(hk * r.DK),
        k((r.HK + hk) * r.DK),
        v(2 * r.HK * r.DK + hv * r.DV),
        count(2 * r.HK * r.DK + r.HV * r.DV) {}
};

// The convolution of the prologue as a call of its own, which would write `y` [B, N, C].
inline ConvVerifyParams convolution_of(const VerifyLayerParams& p, void* y = nullptr) {
  const VerifyParams& v = p.verify;
  const LayerPrologue& from = p.prologue;
  ConvVerifyParams conv;
  conv.B = v.B;
  conv.N = v.N;
  conv.C = LayerChannels(v.rec, 0, 0).count;
  conv.W = from.W;
  conv.x = from.mixed;
  conv.weight = from.weight;
  conv.bias = from.bias;
  conv.activation = Activation::kSilu;
  conv.state = from.window;
  conv.slots = v.slots;
  conv.parents = v.parents;
  conv.lengths = v.lengths;
  conv.has_pending = v.has_pending;
  conv.pending = from.pending;
  conv.pending_path = v.pending_path;
  conv.has_prefix = v.has_prefix;
  conv.prefix = from.prefix;
  conv.prefix_parents = v.prefix_parents;
  conv.y = y;
  return conv;
}

// kOk, or what is wrong with the parameters, whatever the backend.
inline Status check_layer(const VerifyLayerParams& p) {
  const VerifyParams& v = p.verify;
  if (v.rec.HK <= 0 || v.rec.HV % v.rec.HK != 0) return Status::kInvalidArgument;
  if (v.has_pending && v.has_prefix) return Status::kInvalidArgument;
  if (v.strategy == Strategy::kSolve || v.precision != Precision::kIeee) return Status::kUnsupported;
  if (!p.has_prologue) {
    const bool gates_fit = (v.rec.gate == Gate::kNone) == (v.g == nullptr);
    const bool betas_fit = (v.rec.update == Update::kDelta) == (v.beta != nullptr);
    return gates_fit && betas_fit ? Status::kOk : Status::kInvalidArgument;
  }
  const LayerPrologue& from = p.prologue;
  if (v.rec.gate != Gate::kHead || v.rec.update != Update::kDelta) return Status::kUnsupported;
  if (from.W < 1 || from.W > kMaxConvWidth) return Status::kUnsupported;
  if (from.mixed.dtype != v.dtype) return Status::kInvalidArgument;
  if (from.window.dtype != v.dtype && from.window.dtype != DType::kFloat32) return Status::kUnsupported;
  const bool pending_fits = from.pending.dtype == v.dtype && from.pending.nodes == v.pending.nodes;
  const bool prefix_fits = from.prefix.dtype == v.dtype && from.prefix.nodes == v.prefix.nodes;
  if ((v.has_pending && !pending_fits) || (v.has_prefix && !prefix_fits)) return Status::kInvalidArgument;
  return Status::kOk;
}

}  // namespace specdec
