// Random calls of a layer between its projections, poisoned wherever a kernel must not look: ragged rows,
// padding, chains and trees, something pending or a prefix.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "buffer.h"
#include "specdec/layer_params.h"

namespace specdec::test {

enum class Earlier { kNothing, kPending, kPrefix };

struct LayerCase {
  int64_t B = 3, N = 6, HK = 1, HV = 2, DK = 64, DV = 64, W = 4;
  DType dtype = DType::kFloat32;
  DType window = DType::kFloat32;  // float32 or dtype
  DType state = DType::kFloat32;
  Earlier earlier = Earlier::kNothing;
  bool tree = true, bias = true, neg_eigval = false, norm = true, gate = true;
  int64_t before = 5;       // pending or prefix nodes
  bool plain_beta = false;  // b is 0 or huge: the logistic function of it is the same on every machine
};

// What a call writes besides the pools.
struct LayerOutputs {
  Buffer out, k, u, g;
};

class LayerProblem {
 public:
  LayerCase c;
  int64_t C, pool, slot_stride, window_stride;
  Buffer state, window;

  LayerProblem(const LayerCase& how, uint32_t seed) : c(how), rng_(seed) {
    C = 2 * c.HK * c.DK + c.HV * c.DV;
    pool = c.B + 2;
    slots.resize(pool);
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), rng_);
    slots.resize(c.B);
    if (c.B > 1) slots[0] = -1;
    for (int64_t b = 0; b < c.B; ++b) {
      lengths.push_back(static_cast<int32_t>(b == 1 ? 0 : b == 2 ? c.N + 3 : 1 + below(c.N)));
      valid_.push_back(slots[b] < 0 ? 0 : std::min<int64_t>(lengths[b], c.N));
    }
    const int64_t before = c.earlier == Earlier::kNothing ? 0 : c.before;
    mixed_ = rows(c.dtype, c.N, C);
    gate_ = rows(c.dtype, c.N, c.HV * c.DV);
    a_ = rows(c.dtype, c.N, c.HV);
    b_ = rows(c.dtype, c.N, c.HV);
    for (int64_t i = 0; c.plain_beta && i < c.B * c.N * (c.HV + kGap); ++i) {
      if (!std::isnan(b_[i])) b_.set(i, std::fabs(b_[i]) < 0.5 ? 0.0f : b_[i] > 0.0 ? 100.0f : -100.0f);
    }
    earlier_ = Buffer(c.dtype, c.B * before * (C + kGap));
    for (int64_t row = 0; row < c.B * before; ++row) fill(earlier_, row * (C + kGap), C);
    k_ = floats(c.B * before * c.HK * c.DK, 1.0f / std::sqrt(static_cast<float>(c.DK)));
    u_ = floats(c.B * before * c.HV * c.DV, 1.0f);
    g_ = floats(c.B * before * c.HV, 1.0f);
    for (float& g : g_) g = -std::fabs(g);
    weight_ = floats(C * c.W, 0.5f), bias_ = floats(C, 0.5f);
    A_log_ = floats(c.HV, 1.0f), dt_bias_ = floats(c.HV, 1.0f), norm_ = floats(c.DV, 1.0f);
    slot_stride = c.HV * c.DV * c.DK + 16;
    window_stride = (c.W - 1) * C + 16;
    state = Buffer(c.state, pool * slot_stride);
    window = Buffer(c.window, pool * window_stride);
    for (int64_t b = 0; b < c.B; ++b) {
      if (slots[b] < 0) continue;
      fill(state, slots[b] * slot_stride, c.HV * c.DV * c.DK);
      fill(window, slots[b] * window_stride, (c.W - 1) * C);
    }
    for (int64_t b = 0; b < c.B; ++b) {
      for (int64_t n = 0; n < before; ++n) prefix_parents.push_back(pick_parent(n));
      for (int64_t n = 0; n < c.N; ++n) {
        const int64_t first = c.earlier == Earlier::kPrefix ? before : 0;
        parents.push_back(n < valid_[b] ? pick_parent(first + n) : 1 << 30);
      }
      // An ascending path; all of it in row 2, nothing in row 3.
      std::vector<int32_t> nodes(before);
      std::iota(nodes.begin(), nodes.end(), 0);
      std::shuffle(nodes.begin(), nodes.end(), rng_);
      const int64_t length = b == 2 ? before : b == 3 ? 0 : below(before + 1);
      std::sort(nodes.begin(), nodes.begin() + length);
      std::fill(nodes.begin() + length, nodes.end(), 1 << 30);
      path.insert(path.end(), nodes.begin(), nodes.end());
      path_lengths.push_back(static_cast<int32_t>(length));
    }
  }

  // On pools of the caller's, whose contents are those of this problem's or later ones.
  VerifyLayerParams params(Buffer& state_pool, Buffer& window_pool, LayerOutputs& o) const {
    VerifyLayerParams p;
    VerifyParams& v = p.verify;
    v.rec = {Gate::kHead, Update::kDelta, c.HK, c.HV, c.DK, c.DV};
    v.B = c.B, v.N = c.N, v.dtype = c.dtype;
    v.scale = 0.125f;
    v.qk_l2norm = true;
    v.state = {state_pool.data(), c.state, pool, slot_stride};
    v.slots = slots.data();
    v.lengths = lengths.data();
    v.parents = c.tree ? parents.data() : nullptr;
    const ConvInputView before{earlier_.data(), c.dtype, c.before, c.before * (C + kGap), C + kGap};
    const FactorsView factors{k_.data(), u_.data(), g_.data(), c.before};
    p.has_prologue = true;
    LayerPrologue& from = p.prologue;
    if (c.earlier == Earlier::kPending) {
      v.has_pending = true;
      v.pending = factors;
      v.pending_path = {path.data(), path_lengths.data(), c.before};
      from.pending = before;
    } else if (c.earlier == Earlier::kPrefix) {
      v.has_prefix = true;
      v.prefix = factors;
      v.prefix_parents = c.tree ? prefix_parents.data() : nullptr;
      from.prefix = before;
    }
    from.mixed = {mixed_.data(), c.dtype, c.N, c.N * (C + kGap), C + kGap};
    from.W = c.W;
    from.weight = weight_.data();
    from.bias = c.bias ? bias_.data() : nullptr;
    from.window = {window_pool.data(), c.window, pool, window_stride};
    from.a = a_.data(), from.b = b_.data();
    from.a_stride = from.b_stride = {c.N * (c.HV + kGap), c.HV + kGap, 1};
    from.A_log = A_log_.data(), from.dt_bias = dt_bias_.data();
    from.neg_eigval = c.neg_eigval;
    p.has_epilogue = c.norm;
    p.epilogue.weight = norm_.data();
    p.epilogue.eps = 1e-5f;
    p.epilogue.gate = c.gate ? gate_.data() : nullptr;
    p.epilogue.gate_stride = {c.N * (c.HV * c.DV + kGap), c.HV * c.DV + kGap, c.DV};
    o.out = Buffer(c.dtype, c.B * c.N * c.HV * c.DV);
    o.k = Buffer(DType::kFloat32, c.B * c.N * c.HK * c.DK);
    o.u = Buffer(DType::kFloat32, c.B * c.N * c.HV * c.DV);
    o.g = Buffer(DType::kFloat32, c.B * c.N * c.HV);
    v.out = o.out.data();
    v.k_out = o.k.f32.data(), v.u_out = o.u.f32.data(), v.g_out = o.g.f32.data();
    return p;
  }

  // f(name, data, bytes) for everything that a call reads besides the pools.
  template <typename F>
  void visit_inputs(F&& f) const {
    for (const auto& [name, buffer] : {std::pair<const char*, const Buffer*>{"mixed", &mixed_},
                                       {"a", &a_},
                                       {"b", &b_},
                                       {"gate", &gate_},
                                       {"earlier_mixed", &earlier_}}) {
      f(name, buffer->data(), buffer->bytes());
    }
    for (const auto& [name, values] : {std::pair<const char*, const std::vector<float>*>{"weight", &weight_},
                                       {"bias", &bias_},
                                       {"A_log", &A_log_},
                                       {"dt_bias", &dt_bias_},
                                       {"norm", &norm_},
                                       {"factors.k", &k_},
                                       {"factors.u", &u_},
                                       {"factors.g", &g_}}) {
      f(name, values->data(), values->size() * sizeof(float));
    }
    for (const auto& [name, values] : {std::pair<const char*, const std::vector<int32_t>*>{"slots", &slots},
                                       {"lengths", &lengths},
                                       {"parents", &parents},
                                       {"prefix_parents", &prefix_parents},
                                       {"path", &path},
                                       {"path_lengths", &path_lengths}}) {
      f(name, values->data(), values->size() * sizeof(int32_t));
    }
  }

  int64_t valid(int64_t b) const { return valid_[b]; }
  // The projections of one head.
  double a(int64_t b, int64_t n, int64_t h) const { return a_[(b * c.N + n) * (c.HV + kGap) + h]; }
  double b(int64_t b, int64_t n, int64_t h) const { return b_[(b * c.N + n) * (c.HV + kGap) + h]; }
  double gate(int64_t b, int64_t n, int64_t i) const {
    return gate_[(b * c.N + n) * (c.HV * c.DV + kGap) + i];
  }
  double A_log(int64_t h) const { return A_log_[h]; }
  double dt_bias(int64_t h) const { return dt_bias_[h]; }
  double norm_weight(int64_t i) const { return norm_[i]; }

  std::vector<int32_t> slots, lengths, parents, prefix_parents, path, path_lengths;

 private:
  static constexpr int64_t kGap = 5;  // elements of poison behind every row

  int64_t below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(rng_); }
  int32_t pick_parent(int64_t id) {
    if (!c.tree) return static_cast<int32_t>(id - 1);
    return static_cast<int32_t>(below(2) == 0 ? id - 1 : below(id + 1) - 1);
  }
  // Of 8 significant bits: exact in every type that a buffer may have.
  float value() {
    const float x = std::normal_distribution<float>()(rng_);
    Buffer rounded(DType::kBFloat16, 1);
    rounded.set(0, x);
    return std::fabs(x) < 0x1p-14f ? 0.0f : static_cast<float>(rounded[0]);
  }
  void fill(Buffer& to, int64_t at, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to.set(at + i, value());
  }
  std::vector<float> floats(int64_t count, float scale) {
    std::vector<float> x(count);
    for (float& e : x) e = scale * value();
    return x;
  }
  // [B, nodes, width + kGap] with values in valid nodes.
  Buffer rows(DType dtype, int64_t nodes, int64_t width) {
    Buffer to(dtype, c.B * nodes * (width + kGap));
    for (int64_t b = 0; b < c.B; ++b) {
      for (int64_t n = 0; n < valid_[b]; ++n) fill(to, (b * nodes + n) * (width + kGap), width);
    }
    return to;
  }

  std::mt19937 rng_;
  std::vector<int64_t> valid_;
  Buffer mixed_, a_, b_, gate_, earlier_;
  std::vector<float> k_, u_, g_, weight_, bias_, A_log_, dt_bias_, norm_;
};

// `verify` of a composition: its tokens are those of y [B, N, C], g and beta [B, N, HV].
inline VerifyParams verify_of(const VerifyLayerParams& p, const Buffer& y, const float* g,
                              const float* beta) {
  VerifyParams v = p.verify;
  const LayerChannels first(v.rec, 0, 0);
  const int64_t size = v.dtype == DType::kFloat32 ? 4 : 2;
  const auto channel = [&](int64_t i) { return static_cast<const char*>(y.data()) + i * size; };
  v.q = channel(first.q), v.k = channel(first.k), v.v = channel(first.v);
  v.q_stride = v.k_stride = {v.N * first.count, first.count, v.rec.DK};
  v.v_stride = {v.N * first.count, first.count, v.rec.DV};
  v.g = g, v.beta = beta;
  v.g_stride = v.beta_stride = {v.N * v.rec.HV, v.rec.HV, 1};
  return v;
}

inline void expect_same(const LayerOutputs& a, const LayerOutputs& b, bool out = true) {
  EXPECT_TRUE(!out || same_bits(a.out, b.out)) << "out";
  EXPECT_TRUE(same_bits(a.k, b.k)) << "k";
  EXPECT_TRUE(same_bits(a.u, b.u)) << "u";
  EXPECT_TRUE(same_bits(a.g, b.g)) << "g";
}

}  // namespace specdec::test
