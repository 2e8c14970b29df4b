// Random convolutions, poisoned wherever a kernel must not look, and the formula in float64, following
// parents one by one: what every kernel must agree with.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "buffer.h"
#include "specdec/params.h"

namespace specdec::conv_test {

struct Case {
  int64_t B = 1, N = 4, C = 33, W = 4, prefix = 0;
  bool tree = false, bias = true, silu = true;
  int64_t gap = 5;  // elements between rows and between slots, which nobody may read
  DType dtype = DType::kFloat32, state = DType::kFloat32;
};

// The numbers are float32; a call in another type reads and writes copies of them, and `collect` brings back
// what it wrote. All of them are exact in every type.
class Problem {
 public:
  Problem(const Case& c, unsigned seed) : c(c), rng(seed) {
    x_stride = c.C + c.gap;  // rows sliced from a wider buffer, poisoned between
    fill(x, c.B * c.N * x_stride);
    fill(prefix, c.B * c.prefix * x_stride);
    for (auto* buffer : {&x, &prefix}) {
      for (size_t i = 0; i < buffer->size(); ++i) {
        if (static_cast<int64_t>(i) % x_stride >= c.C) (*buffer)[i] = test::kNaN;
      }
    }
    fill(weight, c.C * c.W);
    fill(bias, c.C);
    slots_total = c.B + 2;
    slot_stride = (c.W - 1) * c.C + c.gap;
    state.assign(slots_total * slot_stride, test::kNaN);
    std::vector<int32_t> order(slots_total);
    for (int64_t s = 0; s < slots_total; ++s) order[s] = static_cast<int32_t>(s);
    std::shuffle(order.begin(), order.end(), rng);
    for (int64_t b = 0; b < c.B; ++b) {
      slots.push_back(order[b]);
      for (int64_t i = 0; i < (c.W - 1) * c.C; ++i) state[slots[b] * slot_stride + i] = value();
      lengths.push_back(static_cast<int32_t>(c.N));
      for (int64_t i = 0; i < c.prefix; ++i) prefix_parents.push_back(pick_parent(i));
      for (int64_t i = 0; i < c.N; ++i) parents.push_back(pick_parent(c.prefix + i));
    }
  }

  ConvVerifyParams params() {
    ConvVerifyParams p;
    p.B = c.B, p.N = c.N, p.C = c.C, p.W = c.W;
    p.x = view(x, &typed_x, c.N);
    p.weight = weight.data();
    p.bias = c.bias ? bias.data() : nullptr;
    p.activation = c.silu ? Activation::kSilu : Activation::kNone;
    p.state = {typed(state, c.state, &typed_state), c.state, slots_total, slot_stride};
    p.slots = slots.data();
    p.parents = c.tree ? parents.data() : nullptr;
    p.lengths = lengths.data();
    p.has_prefix = c.prefix > 0;
    p.prefix = view(prefix, &typed_prefix, c.prefix);
    p.prefix_parents = c.tree ? prefix_parents.data() : nullptr;
    y.assign(c.B * c.N * c.C, test::kNaN);
    p.y = typed(y, c.dtype, &typed_y);
    return p;
  }

  // After a call: y and state as it left them.
  void collect() {
    for (size_t i = 0; c.dtype != DType::kFloat32 && i < y.size(); ++i) y[i] = static_cast<float>(typed_y[i]);
    for (size_t i = 0; c.state != DType::kFloat32 && i < state.size(); ++i)
      state[i] = static_cast<float>(typed_state[i]);
  }

  // [B, nodes, C] with the stride of x.
  ConvInputView view(std::vector<float>& values, test::Buffer* copy, int64_t nodes) const {
    return {typed(values, c.dtype, copy), c.dtype, nodes, nodes * x_stride, x_stride};
  }

  // The same numbers in elements of `dtype`: in *copy, or in place where they are float32.
  static void* typed(std::vector<float>& values, DType dtype, test::Buffer* copy) {
    if (dtype == DType::kFloat32) return values.data();
    *copy = test::Buffer(dtype, static_cast<int64_t>(values.size()));
    for (size_t i = 0; i < values.size(); ++i) {
      if (!std::isnan(values[i])) copy->set(static_cast<int64_t>(i), values[i]);
    }
    return copy->data();
  }

  // Row of id's input (ids over prefix then new nodes), or of the window for id < 0: -1 is the newest row.
  double input(int64_t b, int64_t id, int64_t channel) const {
    if (id < 0) return state[slots[b] * slot_stride + (c.W - 1 + id) * c.C + channel];
    if (id < c.prefix) return prefix[(b * c.prefix + id) * x_stride + channel];
    return x[(b * c.N + id - c.prefix) * x_stride + channel];
  }

  int64_t above(int64_t b, int64_t id) const {
    if (id < 0) return id - 1;
    if (!c.tree) return id - 1;
    return id < c.prefix ? prefix_parents[b * c.prefix + id] : parents[b * c.N + id - c.prefix];
  }

  // y and the tolerance: a sum of W products and a bias carries at most W + 1 roundings of the running
  // magnitude; SiLU has slope at most 1.1, and its own exp, sum and quotient round a few times.
  void reference(int64_t b, int64_t n, int64_t channel, double* value, double* tolerance) const {
    double sum = c.bias ? bias[channel] : 0.0;
    double magnitude = std::abs(sum);
    int64_t id = c.prefix + n;
    for (int64_t j = c.W - 1; j >= 0; --j, id = above(b, id)) {
      const double term = input(b, id, channel) * weight[channel * c.W + j];
      sum += term;
      magnitude += std::abs(term);
    }
    const double eps = std::numeric_limits<float>::epsilon();
    *value = c.silu ? sum / (1.0 + std::exp(-sum)) : sum;
    *tolerance = 1.1 * (c.W + 1) * eps * magnitude + 4 * eps * std::abs(*value);
    // The result rounds once more, by half a unit at most: of 8 or 11 bits, of 2^-24 where float16 is
    // subnormal.
    if (c.dtype == DType::kBFloat16) *tolerance += std::ldexp(std::abs(*value) + *tolerance, -8);
    if (c.dtype == DType::kFloat16)
      *tolerance += std::ldexp(std::abs(*value) + *tolerance, -11) + std::ldexp(1.0, -25);
  }

  // y of a call is what the formula gives, from the state as the call left it.
  void expect_reference() const {
    for (int64_t b = 0; b < c.B; ++b) {
      const int64_t length = slots[b] < 0 ? 0 : std::min<int64_t>(std::max(lengths[b], 0), c.N);
      for (int64_t n = 0; n < c.N; ++n) {
        for (int64_t channel = 0; channel < c.C; ++channel) {
          double want = 0.0, tolerance = 0.0;
          if (n < length) reference(b, n, channel, &want, &tolerance);
          const float got = y[(b * c.N + n) * c.C + channel];
          ASSERT_LE(std::abs(got - want), tolerance)
              << "row " << b << " node " << n << " channel " << channel << " got " << got << " want " << want;
        }
      }
    }
  }

  // Of 8 significant bits.
  float value() {
    const float x = std::normal_distribution<float>()(rng);
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits &= 0xffff0000u;
    float out;
    std::memcpy(&out, &bits, 4);
    return std::abs(out) < 0x1p-14f ? 0.0f : out;
  }
  int32_t pick_parent(int64_t id) {
    if (!c.tree) return static_cast<int32_t>(id - 1);
    return std::uniform_int_distribution<int32_t>(-1, static_cast<int32_t>(id) - 1)(rng);
  }
  void fill(std::vector<float>& out, int64_t n) {
    out.resize(n);
    for (float& e : out) e = value();
  }

  Case c;
  std::mt19937 rng;
  int64_t x_stride, slots_total, slot_stride;
  std::vector<float> x, prefix, weight, bias, state, y;
  std::vector<int32_t> slots, lengths, parents, prefix_parents;
  test::Buffer typed_x, typed_prefix, typed_state, typed_y;
};

}  // namespace specdec::conv_test
