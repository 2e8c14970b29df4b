// A random verification problem: inputs, trees and buffers behind a VerifyParams, poisoned wherever a kernel
// must not look, and the same problem worked out in float64 by stepping along every path.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "ops.h"

namespace specdec::test {

inline float widen(const void* data, DType dtype, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  if (dtype == DType::kBFloat16) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
  }
  const int exponent = (bits >> 10) & 31;
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return bits & 0x3ff ? std::numeric_limits<float>::quiet_NaN() : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(bits & 0x3ff), -24);
  return sign * std::ldexp(static_cast<float>((bits & 0x3ff) | 0x400), exponent - 25);
}

// A buffer of elements of one dtype.
struct Buffer {
  DType dtype = DType::kFloat32;
  std::vector<float> f32;
  std::vector<uint16_t> half;

  Buffer() = default;
  Buffer(DType type, int64_t count) : dtype(type) {
    if (type == DType::kFloat32) {
      f32.assign(count, std::numeric_limits<float>::quiet_NaN());
    } else {
      half.assign(count, 0x7fffu);  // NaN in both
    }
  }
  void* data() { return dtype == DType::kFloat32 ? static_cast<void*>(f32.data()) : half.data(); }
  const void* data() const {
    return dtype == DType::kFloat32 ? static_cast<const void*>(f32.data()) : half.data();
  }
  size_t bytes() const { return f32.size() * 4 + half.size() * 2; }
  double operator[](int64_t i) const { return widen(data(), dtype, i); }
  void set(int64_t i, float x) {
    if (dtype == DType::kFloat32) {
      f32[i] = x;
      return;
    }
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (dtype == DType::kBFloat16) {
      half[i] = static_cast<uint16_t>(bits >> 16);  // truncation: any representable number will do
    } else {
      const int exponent = static_cast<int>((bits >> 23) & 255) - 112;
      half[i] = static_cast<uint16_t>(((bits >> 16) & 0x8000u) |
                                      (exponent <= 0 ? 0u : (exponent << 10) | ((bits >> 13) & 0x3ffu)));
    }
  }
  bool operator==(const Buffer& other) const { return f32 == other.f32 && half == other.half; }
};

inline bool same_bits(const Buffer& a, const Buffer& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data(), b.data(), a.bytes()) == 0;
}

struct Shape {
  Gate gate = Gate::kHead;
  Update update = Update::kDelta;
  int64_t B = 1, N = 4, HK = 1, HV = 2, DK = 32, DV = 24;
  DType dtype = DType::kFloat32;
  DType state = DType::kFloat32;
  bool qk_l2norm = true;
};

// A [B, N, H, D] tensor inside a wider buffer: every row is followed by poison.
struct Tensor {
  Buffer buffer;
  Strides stride;

  Tensor() = default;
  Tensor(DType dtype, int64_t B, int64_t N, int64_t H, int64_t D) {
    stride = {(N + 1) * (H * D + 5), H * D + 5, D};
    buffer = Buffer(dtype, B * stride.b);
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
  Buffer state;
  int64_t slots, slot_stride;
  float scale;

  Problem(const Shape& s, uint32_t seed) : shape(s), random(seed) {
    decays = s.gate == Gate::kNone ? 0 : s.gate == Gate::kHead ? 1 : s.DK;
    q = fill(Tensor(s.dtype, s.B, s.N, s.HK, s.DK), -1.0f, 1.0f);
    k = fill(Tensor(s.dtype, s.B, s.N, s.HK, s.DK), -1.0f, 1.0f);
    v = fill(Tensor(s.dtype, s.B, s.N, s.HV, s.DV), -1.0f, 1.0f);
    if (decays > 0) g = fill(Tensor(DType::kFloat32, s.B, s.N, s.HV, decays), -1.5f, 0.0f);
    if (s.update == Update::kDelta) beta = fill(Tensor(DType::kFloat32, s.B, s.N, s.HV, 1), 0.0f, 1.0f);
    if (!s.qk_l2norm) {  // keys of unit length keep the delta rule stable
      for (int64_t b = 0; b < s.B; ++b) {
        for (int64_t n = 0; n < s.N; ++n) {
          for (int64_t i = 0; i < s.HK * s.DK; ++i) {
            k.buffer.set(k.at(b, n, 0, i), static_cast<float>(k.buffer[k.at(b, n, 0, i)] / std::sqrt(s.DK)));
          }
        }
      }
    }
    slots = s.B + 2;
    slot_stride = s.HV * s.DV * s.DK + 16;
    state = Buffer(s.state, slots * slot_stride);
    for (int64_t i = 0; i < slots; ++i) {
      for (int64_t j = 0; j < s.HV * s.DV * s.DK; ++j) state.set(i * slot_stride + j, uniform(-1.0f, 1.0f));
    }
    scale = 1.0f / std::sqrt(static_cast<float>(s.DK));
  }

  float uniform(float lo, float hi) { return std::uniform_real_distribution<float>(lo, hi)(random); }
  int64_t below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(random); }

  Tensor fill(Tensor t, float lo, float hi) {
    const int64_t heads = (t.stride.n - 5) / t.stride.h;
    for (int64_t b = 0; b < shape.B; ++b) {
      for (int64_t n = 0; n < shape.N; ++n) {
        for (int64_t i = 0; i < heads * t.stride.h; ++i) t.buffer.set(t.at(b, n, 0, i), uniform(lo, hi));
      }
    }
    return t;
  }

  // Tokens [first, first + count) of every sequence.
  VerifyParams params(Buffer& from, int64_t first, int64_t count) const {
    VerifyParams p;
    p.rec = {shape.gate, shape.update, shape.HK, shape.HV, shape.DK, shape.DV};
    p.B = shape.B;
    p.N = count;
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
    p.state = {from.data(), shape.state, slots, slot_stride};
    return p;
  }

  // Runs p (its output pointers are set here).
  Outputs run(VerifyParams p, Status expected = Status::kOk) const {
    const int64_t rows = shape.B * p.N;
    Outputs o{Buffer(shape.dtype, rows * shape.HV * shape.DV),
              Buffer(DType::kFloat32, rows * shape.HK * shape.DK),
              Buffer(DType::kFloat32, rows * shape.HV * shape.DV),
              Buffer(DType::kFloat32, rows * shape.HV * decays)};
    p.out = o.out.data();
    p.k_out = o.k.f32.data();
    p.u_out = o.u.f32.data();
    p.g_out = decays > 0 ? o.g.f32.data() : nullptr;
    if (cpu::verify(p) != expected) o.out = Buffer();
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
    p.state = {into.data(), shape.state, slots, slot_stride};
    return p;
  }

  std::mt19937 random;
};

// One value head of one sequence in float64: stepping from a state along a path of tokens.
struct Reference {
  const Problem& p;
  int64_t b, hv;
  std::vector<double> state;  // [DV, DK]

  Reference(const Problem& problem, const Buffer& from, int64_t slot, int64_t b_, int64_t hv_)
      : p(problem), b(b_), hv(hv_), state(problem.shape.DV * problem.shape.DK) {
    const int64_t at = slot * p.slot_stride + hv * p.shape.DV * p.shape.DK;
    for (size_t i = 0; i < state.size(); ++i) state[i] = from[at + static_cast<int64_t>(i)];
  }

  // Advances by token n; returns its output [DV], its corrected write in `u` and its key in `key`.
  std::vector<double> step(int64_t n, std::vector<double>* u, std::vector<double>* key) {
    const Shape& s = p.shape;
    const int64_t hk = hv / (s.HV / s.HK);
    std::vector<double> k(s.DK), q(s.DK), out(s.DV);
    double k2 = 0, q2 = 0;
    for (int64_t c = 0; c < s.DK; ++c) {
      k[c] = p.k.buffer[p.k.at(b, n, hk, c)];
      q[c] = p.q.buffer[p.q.at(b, n, hk, c)];
      k2 += k[c] * k[c];
      q2 += q[c] * q[c];
    }
    for (int64_t c = 0; c < s.DK; ++c) {
      if (s.qk_l2norm) {
        k[c] /= std::sqrt(k2 + 1e-6);
        q[c] /= std::sqrt(q2 + 1e-6);
      }
      q[c] *= p.scale;
    }
    u->resize(s.DV);
    for (int64_t r = 0; r < s.DV; ++r) {
      double* row = state.data() + r * s.DK;
      double sk = 0;
      for (int64_t c = 0; c < s.DK; ++c) {
        if (p.decays > 0) row[c] *= std::exp(p.g.buffer[p.g.at(b, n, hv, p.decays > 1 ? c : 0)]);
        sk += row[c] * k[c];
      }
      double write = p.v.buffer[p.v.at(b, n, hv, r)];
      if (s.update == Update::kDelta) write = p.beta.buffer[p.beta.at(b, n, hv)] * (write - sk);
      (*u)[r] = write;
      for (int64_t c = 0; c < s.DK; ++c) {
        row[c] += write * k[c];
        out[r] += row[c] * q[c];
      }
    }
    *key = k;
    return out;
  }
};

}  // namespace specdec::test
