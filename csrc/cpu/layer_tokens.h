// Tokens of a layer whose verification starts at the raw projections: q, k, v, g and beta of one sequence,
// head by head, in the working memory of the thread that steps it. The window is only read: what is pending
// is taken from the pending inputs, and finish_layer.h moves the window on when nobody reads it any more.
#pragma once

#include "conv_tile.h"
#include "gates_row.h"
#include "recurrence.h"
#include "scratch.h"
#include "specdec/layer_params.h"

namespace specdec::cpu::SPECDEC_ISA {

class LayerTokens {
 public:
  explicit LayerTokens(const VerifyLayerParams& p)
      : p_(p), conv_(convolution_of(p)), tokens_(p.verify), DK_(p.verify.rec.DK), DV_(p.verify.rec.DV) {
    const int64_t HV = p.verify.rec.HV;
    tokens_.q_stride = tokens_.k_stride = {0, DK_, 0};
    tokens_.v_stride = {0, DV_, 0};
    tokens_.g_stride = tokens_.beta_stride = {0, HV, 1};
  }

  // The verification of what was made last.
  const VerifyParams& params() const { return tokens_; }

  // Working memory of a sequence.
  int64_t floats() const {
    return key_floats() * 2 + value_floats() + 2 * round_up(p_.verify.N * p_.verify.rec.HV, kLineFloats);
  }

  // Row b with `length` new nodes: its gates, all heads at once. `room` has floats().
  void start(int64_t b, int64_t slot, int64_t length, float* room) {
    b_ = b;
    slot_ = slot;
    length_ = length;
    accepted_ = slot >= 0 && conv_.has_pending ? path_length(conv_.pending_path, b, conv_.pending.nodes) : 0;
    tokens_.q = q_ = room;
    tokens_.k = k_ = room + key_floats();
    tokens_.v = v_ = room + 2 * key_floats();
    float* g = room + 2 * key_floats() + value_floats();
    float* beta = g + round_up(p_.verify.N * p_.verify.rec.HV, kLineFloats);
    tokens_.g = g;
    tokens_.beta = beta;
    const LayerPrologue& from = p_.prologue;
    const int64_t HV = p_.verify.rec.HV;
    visit_dtype(p_.verify.dtype, [&](auto tag) {
      using T = decltype(tag);
      for (int64_t n = 0; n < length; ++n) {
        gates_row(static_cast<const T*>(from.a) + b * from.a_stride.b + n * from.a_stride.n,
                  static_cast<const T*>(from.b) + b * from.b_stride.b + n * from.b_stride.n, from.A_log,
                  from.dt_bias, from.neg_eigval, HV, g + n * HV, beta + n * HV);
      }
    });
  }

  void key_head(int64_t hk) {
    const LayerChannels at(p_.verify.rec, hk, 0);
    make(at.q, DK_, q_);
    make(at.k, DK_, k_);
  }
  void value_head(int64_t hv) { make(LayerChannels(p_.verify.rec, 0, hv).v, DV_, v_); }

 private:
  int64_t key_floats() const { return round_up(p_.verify.N * DK_, kLineFloats); }
  int64_t value_floats() const { return round_up(p_.verify.N * DV_, kLineFloats); }

  // to [length, count] in the dtype of the verification.
  void make(int64_t begin, int64_t count, void* to) const {
    if (length_ == 0) return;
    visit_dtype(p_.verify.dtype, [&](auto tag) {
      using X = decltype(tag);
      if (conv_.state.dtype == DType::kFloat32) {
        convolve<X, float>(conv_, b_, slot_, accepted_, length_, begin, count, static_cast<X*>(to), count);
      } else {
        convolve<X, X>(conv_, b_, slot_, accepted_, length_, begin, count, static_cast<X*>(to), count);
      }
    });
  }

  const VerifyLayerParams& p_;
  const ConvVerifyParams conv_;
  VerifyParams tokens_;
  const int64_t DK_, DV_;
  int64_t b_ = 0, slot_ = 0, length_ = 0, accepted_ = 0;
  void *q_ = nullptr, *k_ = nullptr, *v_ = nullptr;
};

}  // namespace specdec::cpu::SPECDEC_ISA
