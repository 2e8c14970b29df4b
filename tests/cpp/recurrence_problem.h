// Random inputs of a recurrence with poisoned gaps, and the sequential recurrence on a tree in float64,
// written token by token: what the matrix forms (prefill, the solve) must agree with.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "specdec/params.h"

namespace specdec {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Shape {
  int64_t B = 1, N = 8, HK = 1, HV = 2, DK = 32, DV = 32;
  Gate gate = Gate::kHead;
  Update update = Update::kDelta;
  bool l2norm = true;
};

inline const Gate kGates[] = {Gate::kNone, Gate::kHead, Gate::kChannel};
inline const Update kUpdates[] = {Update::kAdditive, Update::kDelta};

// What the tokens of one sequence and head give in float64.
struct Truth {
  std::vector<double> k;      // [n, DK] as the recurrence used it
  std::vector<double> u;      // [n, DV]
  std::vector<double> out;    // [n, DV]
  std::vector<double> state;  // [DV, DK] after the last token
  // Largest norm of a value row of any state, and of a query and a key: every number below is a sum of
  // products of these.
  double row_norm = 0.0, q_norm = 0.0, k_norm = 0.0, v_max = 0.0;

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

class Problem {
 public:
  Problem(const Shape& shape, unsigned seed) : s(shape), rng(seed) {
    const int64_t tokens = s.B * s.N;
    decays = s.gate == Gate::kNone ? 0 : s.gate == Gate::kHead ? 1 : s.DK;
    key_stride = {s.N * (s.HK * s.DK + 7), s.HK * s.DK + 7, s.DK};
    value_stride = {s.N * (s.HV * s.DV + 3), s.HV * s.DV + 3, s.DV};
    gate_stride = {s.N * (s.HV * decays + 1), s.HV * decays + 1, decays};
    beta_stride = {s.N * s.HV, s.HV, 1};
    q.assign(tokens * key_stride.n, kNaN);
    k = q;
    v.assign(tokens * value_stride.n, kNaN);
    g.assign(tokens * gate_stride.n, kNaN);
    beta.assign(tokens * s.HV, kNaN);
    slots_total = s.B + 2;
    slot_stride = s.HV * s.DV * s.DK + 16;
    state.assign(slots_total * slot_stride, kNaN);
    std::vector<int32_t> order(slots_total);
    for (int64_t i = 0; i < slots_total; ++i) order[i] = static_cast<int32_t>(i);
    std::shuffle(order.begin(), order.end(), rng);
    std::uniform_real_distribution<float> uniform;
    for (int64_t b = 0; b < s.B; ++b) {
      slots.push_back(order[b]);
      for (int64_t i = 0; i < s.HV * s.DV * s.DK; ++i) state[slots[b] * slot_stride + i] = normal();
      for (int64_t n = 0; n < s.N; ++n) {
        for (int64_t i = 0; i < s.HK * s.DK; ++i) {
          // Without normalisation the keys are short enough for the step to contract.
          const float size = s.l2norm ? 3.0f : 0.7f / std::sqrt(static_cast<float>(s.DK));
          q[b * key_stride.b + n * key_stride.n + i] = normal();
          k[b * key_stride.b + n * key_stride.n + i] = size * normal();
        }
        for (int64_t i = 0; i < s.HV * s.DV; ++i) v[b * value_stride.b + n * value_stride.n + i] = normal();
        for (int64_t i = 0; i < s.HV * decays; ++i) {
          // Mostly mild, some strong, some saturated.
          const float pick = uniform(rng);
          g[b * gate_stride.b + n * gate_stride.n + i] =
              pick < 0.01f ? -std::numeric_limits<float>::infinity()
                           : (pick < 0.03f ? -1e4f : (pick < 0.2f ? -3.0f : -0.05f) * uniform(rng));
        }
        for (int64_t h = 0; h < s.HV; ++h) beta[(b * s.N + n) * s.HV + h] = 1.9f * uniform(rng);
      }
    }
  }

  template <typename Params>
  void fill_common(Params& p) {
    p.rec = {s.gate, s.update, s.HK, s.HV, s.DK, s.DV};
    p.B = s.B;
    p.q = q.data(), p.k = k.data(), p.v = v.data();
    p.g = decays > 0 ? g.data() : nullptr;
    p.beta = s.update == Update::kDelta ? beta.data() : nullptr;
    p.q_stride = p.k_stride = key_stride;
    p.v_stride = value_stride;
    p.g_stride = gate_stride;
    p.beta_stride = beta_stride;
    p.scale = scale;
    p.qk_l2norm = s.l2norm;
    p.state = {state.data(), DType::kFloat32, slots_total, slot_stride};
    p.slots = slots.data();
    out.assign(s.B * s.N * s.HV * s.DV, kNaN);
    p.out = out.data();
  }

  // Tokens [first, first + n) of row b in value head hv; parents [n] or null for a chain; S0 [DV, DK].
  template <typename State>
  Truth truth(int64_t b, int64_t first, int64_t n, int64_t hv, const int32_t* parents,
              const State* S0) const {
    const int64_t DK = s.DK, DV = s.DV, hk = hv / (s.HV / s.HK);
    Truth t;
    std::vector<std::vector<double>> states(n);
    const std::vector<double> root(S0, S0 + DV * DK);
    t.row_norm = row_norm(root);
    t.state = root;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t token = first + i;
      const int64_t parent = parents != nullptr ? parents[i] : i - 1;
      std::vector<double> S = parent < 0 ? root : states[parent];
      const float* kf = &k[b * key_stride.b + token * key_stride.n + hk * key_stride.h];
      const float* qf = &q[b * key_stride.b + token * key_stride.n + hk * key_stride.h];
      std::vector<double> key(kf, kf + DK), query(qf, qf + DK);
      for (auto* x : {&key, &query}) {
        const double unit = s.l2norm ? 1.0 / std::sqrt(norm2(*x) + 1e-6) : 1.0;
        for (double& e : *x) e *= x == &query ? unit * scale : unit;
      }
      t.q_norm = std::max(t.q_norm, std::sqrt(norm2(query)));
      t.k_norm = std::max(t.k_norm, std::sqrt(norm2(key)));
      for (int64_t r = 0; r < DV; ++r) {
        double read = 0.0, answer = 0.0;
        for (int64_t c = 0; c < DK; ++c) {
          if (decays > 0) {
            const int64_t at = b * gate_stride.b + token * gate_stride.n + hv * decays;
            S[r * DK + c] *= std::exp(static_cast<double>(g[at + (decays > 1 ? c : 0)]));
          }
          read += S[r * DK + c] * key[c];
        }
        const double value = v[b * value_stride.b + token * value_stride.n + hv * DV + r];
        t.v_max = std::max(t.v_max, std::abs(value));
        const double write =
            s.update == Update::kDelta ? beta[(b * s.N + token) * s.HV + hv] * (value - read) : value;
        for (int64_t c = 0; c < DK; ++c) {
          S[r * DK + c] += write * key[c];
          answer += S[r * DK + c] * query[c];
        }
        t.u.push_back(write);
        t.out.push_back(answer);
      }
      t.k.insert(t.k.end(), key.begin(), key.end());
      t.row_norm = std::max(t.row_norm, row_norm(S));
      t.state = S;
      states[i] = std::move(S);
      if (parents == nullptr && i > 0) states[i - 1] = {};
    }
    return t;
  }

  const float* state_of(int64_t b, int64_t hv) const {
    return &state[slots[b] * slot_stride + hv * s.DV * s.DK];
  }

  float normal() { return std::normal_distribution<float>()(rng); }

  static double norm2(const std::vector<double>& x) {
    double sum = 0.0;
    for (const double e : x) sum += e * e;
    return sum;
  }
  double row_norm(const std::vector<double>& S) const {
    double most = 0.0;
    for (int64_t r = 0; r < s.DV; ++r) {
      most = std::max(most, std::sqrt(norm2({S.begin() + r * s.DK, S.begin() + (r + 1) * s.DK})));
    }
    return most;
  }

  Shape s;
  std::mt19937 rng;
  float scale = 0.25f;
  int64_t decays, slots_total, slot_stride;
  Strides key_stride, value_stride, gate_stride, beta_stride;
  std::vector<float> q, k, v, g, beta, state, out;
  std::vector<int32_t> slots;
};

}  // namespace specdec
