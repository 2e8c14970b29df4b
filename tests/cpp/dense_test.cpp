// Dense kernels through their C++ entry points: packing as the header describes it, results against sums in
// double, bits independent of the number of rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "ops.h"

namespace specdec {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr double kRoundoff = 0x1p-24;

std::vector<float> random_values(size_t count, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& v : values) v = normal(engine);
  return values;
}

uint16_t to_bfloat16(float x) {  // truncated: any bfloat16 will do
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>(bits >> 16);
}

float from_bfloat16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

int64_t panels_of(int64_t N) { return (N + kPanelWidth - 1) / kPanelWidth; }

// [N, K] -> [panels, K, 32]
std::vector<float> pack_float32(const std::vector<float>& weight, int64_t N, int64_t K) {
  std::vector<float> packed(panels_of(N) * K * kPanelWidth, 0.0f);
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t k = 0; k < K; ++k) {
      packed[(n / kPanelWidth * K + k) * kPanelWidth + n % kPanelWidth] = weight[n * K + k];
    }
  }
  return packed;
}

// [N, K] -> [panels, K, 16, 2]
std::vector<uint16_t> pack_bfloat16(const std::vector<float>& weight, int64_t N, int64_t K) {
  std::vector<uint16_t> packed(panels_of(N) * K * kPanelWidth, 0);
  for (int64_t n = 0; n < N; ++n) {
    const int64_t j = n % kPanelWidth;
    for (int64_t k = 0; k < K; ++k) {
      const int64_t at = (n / kPanelWidth * K + k) * kPanelWidth + j % 16 * 2 + j / 16;
      packed[at] = to_bfloat16(weight[n * K + k]);
    }
  }
  return packed;
}

// [N, K] -> [panels, K + 4, 32]; `weight` becomes what the bytes and scales stand for.
std::vector<int8_t> pack_int8(std::vector<float>& weight, int64_t N, int64_t K) {
  const int64_t panel = (K + kScaleRows) * kPanelWidth;
  std::vector<int8_t> packed(panels_of(N) * panel, 0);
  for (int64_t n = 0; n < N; ++n) {
    int8_t* at = packed.data() + n / kPanelWidth * panel;
    const int64_t j = n % kPanelWidth;
    const float scale = 0.5f + 0.01f * static_cast<float>(n);
    std::memcpy(at + K * kPanelWidth + j * sizeof(float), &scale, sizeof(float));
    for (int64_t k = 0; k < K; ++k) {
      const float number = std::clamp(std::round(weight[n * K + k] * 50.0f), -127.0f, 127.0f);
      at[k * kPanelWidth + j] = static_cast<int8_t>(number);
      weight[n * K + k] = number * scale;
    }
  }
  return packed;
}

RowsView rows_view(const std::vector<float>& x, int64_t rows, int64_t stride) {
  RowsView view;
  view.data = x.data();
  view.rows = view.inner = rows;
  view.stride_inner = stride;
  return view;
}

struct Size {
  int64_t rows, K, N;
};

class Linear : public ::testing::TestWithParam<Size> {
 protected:
  void check(const std::vector<float>& weight, const void* packed, WeightType type) {
    const auto [rows, K, N] = GetParam();
    const std::vector<float> x = random_values(rows * K, 1), bias = random_values(N, 2);
    LinearParams p;
    p.K = K;
    p.N = N;
    p.x = rows_view(x, rows, K);
    p.weight = packed;
    p.weight_type = type;
    p.bias = bias.data();
    std::vector<float> y(rows * N, kNaN);
    p.y = y.data();
    ASSERT_EQ(cpu::linear(p), Status::kOk);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t n = 0; n < N; ++n) {
        double sum = bias[n], magnitude = std::fabs(bias[n]);
        for (int64_t k = 0; k < K; ++k) {
          const double product = static_cast<double>(x[r * K + k]) * weight[n * K + k];
          sum += product;
          magnitude += std::fabs(product);
        }
        // K multiply-adds of two roundings each where the machine does not fuse them, scale and bias.
        ASSERT_NEAR(y[r * N + n], sum, (2 * K + 3) * kRoundoff * magnitude) << "row " << r << " output " << n;
      }
      std::vector<float> alone(N, kNaN);
      LinearParams one = p;
      one.x = rows_view(x, 1, K);
      one.x.data = x.data() + r * K;
      one.y = alone.data();
      ASSERT_EQ(cpu::linear(one), Status::kOk);
      ASSERT_EQ(std::memcmp(alone.data(), y.data() + r * N, N * sizeof(float)), 0) << "row " << r;
    }
  }
};

TEST_P(Linear, Float32) {
  const auto [rows, K, N] = GetParam();
  const std::vector<float> weight = random_values(N * K, 3);
  const std::vector<float> packed = pack_float32(weight, N, K);
  check(weight, packed.data(), WeightType::kFloat32);
}

TEST_P(Linear, Int8) {
  const auto [rows, K, N] = GetParam();
  std::vector<float> weight = random_values(N * K, 5);
  const std::vector<int8_t> packed = pack_int8(weight, N, K);
  check(weight, packed.data(), WeightType::kInt8);
}

TEST_P(Linear, BFloat16) {
  const auto [rows, K, N] = GetParam();
  std::vector<float> weight = random_values(N * K, 4);
  const std::vector<uint16_t> packed = pack_bfloat16(weight, N, K);
  for (float& w : weight) w = from_bfloat16(to_bfloat16(w));
  check(weight, packed.data(), WeightType::kBFloat16);
}

INSTANTIATE_TEST_SUITE_P(Sizes, Linear,
                         ::testing::Values(Size{1, 1, 1}, Size{1, 256, 776}, Size{9, 256, 100},
                                           Size{13, 7, 33}, Size{25, 513, 65}, Size{150, 1030, 40}),
                         [](const auto& info) {
                           return std::to_string(info.param.rows) + "x" + std::to_string(info.param.K) + "x" +
                                  std::to_string(info.param.N);
                         });

TEST(RmsNorm, StridedRowsWithGate) {
  constexpr int64_t outer = 2, inner = 3, D = 21, stride_inner = 30, stride_outer = 200;
  std::vector<float> x(outer * stride_outer, kNaN), gate(x);
  const std::vector<float> values = random_values(outer * inner * D, 1),
                           gates = random_values(outer * inner * D, 2);
  for (int64_t r = 0; r < outer * inner; ++r) {
    const int64_t at = r / inner * stride_outer + r % inner * stride_inner;
    std::copy_n(values.begin() + r * D, D, x.begin() + at);
    std::copy_n(gates.begin() + r * D, D, gate.begin() + at);
  }
  const std::vector<float> weight = random_values(D, 3);
  std::vector<float> y(outer * inner * D, kNaN);
  RmsNormParams p;
  p.D = D;
  p.x.data = x.data();
  p.x.rows = outer * inner;
  p.x.inner = inner;
  p.x.stride_outer = stride_outer;
  p.x.stride_inner = stride_inner;
  p.gate = p.x;
  p.gate.data = gate.data();
  p.has_gate = true;
  p.weight = weight.data();
  p.eps = 1e-5f;
  p.y = y.data();
  ASSERT_EQ(cpu::rms_norm(p), Status::kOk);
  for (int64_t r = 0; r < outer * inner; ++r) {
    double mean = 0;
    for (int64_t i = 0; i < D; ++i) mean += static_cast<double>(values[r * D + i]) * values[r * D + i] / D;
    for (int64_t i = 0; i < D; ++i) {
      const double z = gates[r * D + i];
      const double want = values[r * D + i] / std::sqrt(mean + p.eps) * weight[i] * z / (1 + std::exp(-z));
      // D squares and sums under the root, a dozen operations after it, of which exp is good to 2 roundoffs.
      ASSERT_NEAR(y[r * D + i], want, (D + 16) * kRoundoff * std::fabs(want))
          << "row " << r << " value " << i;
    }
  }
}

TEST(Swiglu, WritesEveryValue) {
  constexpr int64_t rows = 3, F = 37;
  const std::vector<float> x = random_values(rows * 2 * F, 1);
  std::vector<float> y(rows * F, kNaN);
  SwigluParams p;
  p.F = F;
  p.x = rows_view(x, rows, 2 * F);
  p.y = y.data();
  ASSERT_EQ(cpu::swiglu(p), Status::kOk);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < F; ++i) {
      const double z = x[r * 2 * F + i];
      const double want = z / (1 + std::exp(-z)) * x[r * 2 * F + F + i];
      ASSERT_NEAR(y[r * F + i], want, 9 * kRoundoff * std::fabs(want)) << "row " << r << " value " << i;
    }
  }
}

TEST(Gates, LargeArgumentsNeitherOverflowNorVanish) {
  const std::vector<float> a = {-100.0f, -30.0f, 0.0f, 30.0f, 100.0f, 1000.0f};
  const std::vector<float> zeros(a.size(), 0.0f);
  std::vector<float> g(a.size(), kNaN), beta(a.size(), kNaN);
  GatesParams p;
  p.HV = static_cast<int64_t>(a.size());
  p.a = p.b = rows_view(a, 1, p.HV);
  p.A_log = p.dt_bias = zeros.data();
  p.neg_eigval = true;
  p.g = g.data();
  p.beta = beta.data();
  ASSERT_EQ(cpu::gated_delta_gates(p), Status::kOk);
  for (size_t i = 0; i < a.size(); ++i) {
    const double x = a[i];
    const double softplus = std::fmax(x, 0) + std::log1p(std::exp(-std::fabs(x)));
    ASSERT_NEAR(g[i], -softplus, 16 * kRoundoff * softplus + 1e-38) << "a = " << x;
    const double want = 2 / (1 + std::exp(-x));
    ASSERT_NEAR(beta[i], want, 8 * kRoundoff * want + 1e-37) << "b = " << x;
  }
}

}  // namespace
}  // namespace specdec
