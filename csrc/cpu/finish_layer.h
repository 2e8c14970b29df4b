// What a layer does when all tiles of a head, or of a sequence, are done, by the thread that does the last
// one: the norm of the head's outputs, and the window that moves on, which no tile may see before.
#pragma once

#include <atomic>
#include <memory>

#include "conv_window.h"
#include "row_ops.h"
#include "specdec/layer_params.h"

namespace specdec::cpu::SPECDEC_ISA {

class FinishLayer {
 public:
  // A head takes `tiles` tiles.
  FinishLayer(const VerifyLayerParams& p, int64_t tiles)
      : p_(p), tiles_(tiles), moves_(p.has_prologue && p.verify.has_pending && p.prologue.W > 1) {
    const int64_t B = p.verify.B;
    if (p.has_epilogue) heads_.reset(new std::atomic<int64_t>[B * p.verify.rec.HV]());
    if (moves_) sequences_.reset(new std::atomic<int64_t>[B]());
  }

  // `count` more tiles of value head hv of row b are done.
  void add(int64_t b, int64_t slot, int64_t length, int64_t hv, int64_t count) {
    if (slot < 0) return;
    const int64_t HV = p_.verify.rec.HV;
    const auto last = [count](std::atomic<int64_t>& done, int64_t all) {
      return done.fetch_add(count, std::memory_order_acq_rel) + count == all;
    };
    if (heads_ != nullptr && last(heads_[b * HV + hv], tiles_)) norm(b, length, hv);
    if (moves_ && last(sequences_[b], tiles_ * HV)) move_window(b, slot);
  }

 private:
  void norm(int64_t b, int64_t length, int64_t hv) const {
    const VerifyParams& v = p_.verify;
    const LayerEpilogue& e = p_.epilogue;
    const int64_t DV = v.rec.DV;
    visit_dtype(v.dtype, [&](auto tag) {
      using T = decltype(tag);
      for (int64_t n = 0; n < length; ++n) {
        T* out = static_cast<T*>(v.out) + ((b * v.N + n) * v.rec.HV + hv) * DV;
        const Strides& stride = e.gate_stride;
        const T* gate = e.gate == nullptr
                            ? nullptr
                            : static_cast<const T*>(e.gate) + b * stride.b + n * stride.n + hv * stride.h;
        rms_norm_row(out, gate, e.weight, e.eps, DV, out);
      }
    });
  }

  void move_window(int64_t b, int64_t slot) const {
    const ConvVerifyParams conv = convolution_of(p_);
    const int64_t at = slot * conv.state.slot_stride;
    visit_dtype(conv.x.dtype, [&](auto tag) {
      using X = decltype(tag);
      if (conv.state.dtype == DType::kFloat32) {
        advance_window<X, float>(static_cast<float*>(conv.state.data) + at, conv.pending, conv.pending_path,
                                 b, conv.C, conv.W);
      } else {
        advance_window<X, X>(static_cast<X*>(conv.state.data) + at, conv.pending, conv.pending_path, b,
                             conv.C, conv.W);
      }
    });
  }

  const VerifyLayerParams& p_;
  const int64_t tiles_;
  const bool moves_;
  std::unique_ptr<std::atomic<int64_t>[]> heads_;      // [B, HV] tiles that are done; null without a norm
  std::unique_ptr<std::atomic<int64_t>[]> sequences_;  // [B]; null where no window moves
};

}  // namespace specdec::cpu::SPECDEC_ISA
