// Random inputs of a recurrence, poisoned wherever a kernel must not look, and the recurrence itself in
// float64, written token by token along the paths of a tree: what every kernel must agree with.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "buffer.h"
#include "ops.h"

namespace specdec::test {

inline const Gate kGates[] = {Gate::kNone, Gate::kHead, Gate::kChannel};
inline const Update kUpdates[] = {Update::kAdditive, Update::kDelta};

struct Shape {
  Gate gate = Gate::kHead;
  Update update = Update::kDelta;
  int64_t B = 1, N = 4, HK = 1, HV = 2, DK = 32, DV = 24;
  DType dtype = DType::kFloat32;
  DType state = DType::kFloat32;
  bool qk_l2norm = true;
  int64_t gap = 5;  // elements of poison between two tokens of an input
};

// A [B, N, H, D] tensor inside a wider buffer: every row is followed by poison.
struct Tensor {
  Buffer buffer;
  Strides stride;
  int64_t heads = 0;

  Tensor() = default;
  Tensor(DType dtype, const Shape& s, int64_t H, int64_t D) : heads(H) {
    stride = {(s.N + 1) * (H * D + s.gap), H * D + s.gap, D};
    buffer = Buffer(dtype, s.B * stride.b);
  }
  int64_t at(int64_t b, int64_t n, int64_t h, int64_t d = 0) const {
    return b * stride.b + n * stride.n + h * stride.h + d;
  }
};

// What a call of verify writes.
struct Outputs {
  Buffer out, k, u, g;
};

struct Problem {
  Shape shape;
  int64_t decays;  // numbers of g a value head
  Tensor q, k, v, g, beta;
  Buffer state;                // [pool, slot_stride]: NaN in gaps and in slots that no sequence has
  std::vector<int32_t> slots;  // [B]
  int64_t pool, slot_stride;
  float scale;

  Problem(const Shape& s, uint32_t seed) : shape(s), random(seed) {
    decays = s.gate == Gate::kNone ? 0 : s.gate == Gate::kHead ? 1 : s.DK;
    q = fill(Tensor(s.dtype, s, s.HK, s.DK), [&] { return uniform(-1.0f, 1.0f); });
    // Keys of at most unit length keep the delta rule stable.
    const float unit = s.qk_l2norm ? 3.0f : 1.0f / std::sqrt(static_cast<float>(s.DK));
    k = fill(Tensor(s.dtype, s, s.HK, s.DK), [&] { return unit * uniform(-1.0f, 1.0f); });
    v = fill(Tensor(s.dtype, s, s.HV, s.DV), [&] { return uniform(-1.0f, 1.0f); });
    if (decays > 0) {
      g = fill(Tensor(DType::kFloat32, s, s.HV, decays), [&] {
        // Mostly mild, some strong, some saturated.
        const float pick = uniform(0.0f, 1.0f);
        if (pick < 0.01f) return -std::numeric_limits<float>::infinity();
        return (pick < 0.03f ? -1e4f : pick < 0.2f ? -3.0f : -0.05f) * uniform(0.0f, 1.0f);
      });
    }
    if (s.update == Update::kDelta) {
      beta = fill(Tensor(DType::kFloat32, s, s.HV, 1), [&] { return uniform(0.0f, 1.9f); });
    }
    pool = s.B + 2;
    slots.resize(pool);
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), random);
    slots.resize(s.B);
    slot_stride = s.HV * s.DV * s.DK + 16;
    state = Buffer(s.state, pool * slot_stride);
    for (int64_t b = 0; b < s.B; ++b) {
      for (int64_t i = 0; i < s.HV * s.DV * s.DK; ++i) state.set(state_at(b) + i, uniform(-1.0f, 1.0f));
    }
    scale = 1.0f / std::sqrt(static_cast<float>(s.DK));
  }

  float uniform(float lo, float hi) { return std::uniform_real_distribution<float>(lo, hi)(random); }
  int64_t below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(random); }

  // The state [DV, DK] of value head hv of sequence b.
  int64_t state_at(int64_t b, int64_t hv = 0) const {
    return slots[b] * slot_stride + hv * shape.DV * shape.DK;
  }

  template <typename F>
  Tensor fill(Tensor t, F&& next) {
    for (int64_t b = 0; b < shape.B; ++b) {
      for (int64_t n = 0; n < shape.N; ++n) {
        for (int64_t i = 0; i < t.heads * t.stride.h; ++i) t.buffer.set(t.at(b, n, 0, i), next());
      }
    }
    return t;
  }

  // Tokens of every sequence from `first` on, for VerifyParams and PrefillParams.
  template <typename Params>
  void fill_common(Params& p, Buffer& from, int64_t first) const {
    p.rec = {shape.gate, shape.update, shape.HK, shape.HV, shape.DK, shape.DV};
    p.B = shape.B;
    p.dtype = shape.dtype;
    const int64_t size = shape.dtype == DType::kFloat32 ? 4 : 2;
    p.q = static_cast<const char*>(q.buffer.data()) + q.at(0, first, 0) * size;
    p.k = static_cast<const char*>(k.buffer.data()) + k.at(0, first, 0) * size;
    p.v = static_cast<const char*>(v.buffer.data()) + v.at(0, first, 0) * size;
    if (decays > 0) p.g = g.buffer.f32.data() + g.at(0, first, 0);
    if (shape.update == Update::kDelta) p.beta = beta.buffer.f32.data() + beta.at(0, first, 0);
    p.q_stride = q.stride, p.k_stride = k.stride, p.v_stride = v.stride;
    p.g_stride = g.stride, p.beta_stride = beta.stride;
    p.scale = scale;
    p.qk_l2norm = shape.qk_l2norm;
    p.state = {from.data(), shape.state, pool, slot_stride};
    p.slots = slots.data();
  }

  // Tokens [first, first + count) of every sequence.
  VerifyParams params(Buffer& from, int64_t first, int64_t count) const {
    VerifyParams p;
    fill_common(p, from, first);
    p.N = count;
    return p;
  }

  // p, of the whole batch, becomes that of row b alone.
  template <typename Params>
  void only_row(Params& p, int64_t b) const {
    p.B = 1;
    p.q = &q.buffer.f32[q.at(b, 0, 0)], p.k = &k.buffer.f32[k.at(b, 0, 0)];
    p.v = &v.buffer.f32[v.at(b, 0, 0)];
    if (p.g != nullptr) p.g = &g.buffer.f32[g.at(b, 0, 0)];
    if (p.beta != nullptr) p.beta = &beta.buffer.f32[beta.at(b, 0, 0)];
    p.slots = &slots[b];
  }

  // The backend under test.
  virtual ~Problem() = default;
  virtual Status call(const VerifyParams& p) const { return cpu::verify(p); }
  virtual Status call(const CommitParams& p) const { return cpu::commit(p); }
  virtual Status call(const PrefillParams& p) const { return cpu::prefill(p); }

  // Runs p (its output pointers are set here).
  Outputs run(VerifyParams p, Status expected = Status::kOk) const {
    const int64_t rows = p.B * p.N;
    Outputs o{Buffer(shape.dtype, rows * shape.HV * shape.DV),
              Buffer(DType::kFloat32, rows * shape.HK * shape.DK),
              Buffer(DType::kFloat32, rows * shape.HV * shape.DV),
              Buffer(DType::kFloat32, rows * shape.HV * decays)};
    p.out = o.out.data();
    p.k_out = o.k.f32.data();
    p.u_out = o.u.f32.data();
    p.g_out = decays > 0 ? o.g.f32.data() : nullptr;
    EXPECT_EQ(call(p), expected);
    return o;
  }

  FactorsView factors(const Outputs& o, int64_t nodes) const {
    return {o.k.f32.data(), o.u.f32.data(), decays > 0 ? o.g.f32.data() : nullptr, nodes};
  }

  CommitParams commit_params(Buffer& into, const FactorsView& view, const PathView& path) const {
    CommitParams p;
    p.rec = {shape.gate, shape.update, shape.HK, shape.HV, shape.DK, shape.DV};
    p.B = shape.B;
    p.factors = view;
    p.path = path;
    p.state = {into.data(), shape.state, pool, slot_stride};
    p.slots = slots.data();
    return p;
  }

  std::mt19937 random;
};

inline double norm2(const double* x, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  return sum;
}

// What one token gives in float64: key and query as the recurrence uses them, its write and its answer.
struct Step {
  std::vector<double> k, q, u, out;
};

// One value head of one sequence in float64: stepping from a state along a path of tokens.
struct Reference {
  const Problem* problem;
  int64_t b, hv;
  std::vector<double> state;  // [DV, DK]

  // Tokens of row b; the state lies at element `at` of `from`.
  Reference(const Problem& p, const Buffer& from, int64_t at, int64_t b_, int64_t hv_)
      : problem(&p), b(b_), hv(hv_), state(p.shape.DV * p.shape.DK) {
    for (size_t i = 0; i < state.size(); ++i) state[i] = from[at + static_cast<int64_t>(i)];
  }

  Step step(int64_t n) {
    const Problem& p = *problem;
    const Shape& s = p.shape;
    const int64_t hk = hv / (s.HV / s.HK);
    Step t{std::vector<double>(s.DK), std::vector<double>(s.DK), std::vector<double>(s.DV),
           std::vector<double>(s.DV)};
    for (int64_t c = 0; c < s.DK; ++c) {
      t.k[c] = p.k.buffer[p.k.at(b, n, hk, c)];
      t.q[c] = p.q.buffer[p.q.at(b, n, hk, c)];
    }
    const double k_unit = s.qk_l2norm ? std::sqrt(norm2(t.k.data(), s.DK) + 1e-6) : 1.0;
    const double q_unit = s.qk_l2norm ? std::sqrt(norm2(t.q.data(), s.DK) + 1e-6) : 1.0;
    for (int64_t c = 0; c < s.DK; ++c) {
      t.k[c] /= k_unit;
      t.q[c] *= p.scale / q_unit;
    }
    std::vector<double> decay(p.decays);
    for (int64_t c = 0; c < p.decays; ++c) decay[c] = std::exp(p.g.buffer[p.g.at(b, n, hv, c)]);
    for (int64_t r = 0; r < s.DV; ++r) {
      double* row = state.data() + r * s.DK;
      double sk = 0;
      for (int64_t c = 0; c < s.DK; ++c) {
        if (p.decays > 0) row[c] *= decay[p.decays > 1 ? c : 0];
        sk += row[c] * t.k[c];
      }
      double write = p.v.buffer[p.v.at(b, n, hv, r)];
      if (s.update == Update::kDelta) write = p.beta.buffer[p.beta.at(b, n, hv)] * (write - sk);
      t.u[r] = write;
      for (int64_t c = 0; c < s.DK; ++c) {
        row[c] += write * t.k[c];
        t.out[r] += row[c] * t.q[c];
      }
    }
    return t;
  }
};

// What the tokens [first, first + n) of one row and value head give in float64, on the tree `parents` [n] or,
// where null, on a chain, and how far a float32 kernel in another order may be from it.
struct Truth {
  std::vector<Step> steps;    // [n]
  std::vector<double> state;  // [DV, DK] after the last token
  // Largest norm of a value row of any state, and of a query and a key: every number below is a sum of
  // products of these.
  double row_norm = 0.0, q_norm = 0.0, k_norm = 0.0, v_max = 0.0;

  Truth(const Reference& root, int64_t first, int64_t n, const int32_t* parents) {
    const Shape& s = root.problem->shape;
    see_rows(root.state, s.DK);
    std::vector<Reference> nodes;  // of a chain the last alone
    for (int64_t i = 0; i < n; ++i) {
      const int64_t parent = parents != nullptr ? parents[i] : i - 1;
      Reference node = parent < 0 ? root : parents != nullptr ? nodes[parent] : nodes.back();
      steps.push_back(node.step(first + i));
      q_norm = std::max(q_norm, std::sqrt(norm2(steps[i].q.data(), s.DK)));
      k_norm = std::max(k_norm, std::sqrt(norm2(steps[i].k.data(), s.DK)));
      for (int64_t r = 0; r < s.DV; ++r) {
        const Tensor& v = root.problem->v;
        v_max = std::max(v_max, std::abs(v.buffer[v.at(root.b, first + i, root.hv, r)]));
      }
      see_rows(node.state, s.DK);
      if (parents == nullptr) nodes.clear();
      nodes.push_back(std::move(node));
    }
    state = n > 0 ? nodes.back().state : root.state;
  }

  void see_rows(const std::vector<double>& S, int64_t DK) {
    for (size_t r = 0; r < S.size(); r += DK) row_norm = std::max(row_norm, std::sqrt(norm2(&S[r], DK)));
  }

  // A dot product over DK rounds DK times by at most eps / 2 of its running value, with independent signs: a
  // standard deviation below eps / 2 sqrt(DK) of the bound of the sum. The step contracts (|k| <= 1, 0 <= b
  // <= 2, a <= 1: |a (I - b k k^T)| <= 1), so the errors of n tokens and of the initial state add up
  // unamplified, again with independent signs. Eight standard deviations: the largest of a million numbers
  // stays below five.
  double tolerance(int64_t DK, int64_t n, double scale) const {
    const double eps = std::numeric_limits<float>::epsilon();
    return 8.0 * (eps / 2) * std::sqrt(static_cast<double>(DK * (n + 1))) * scale;
  }
};

}  // namespace specdec::test
