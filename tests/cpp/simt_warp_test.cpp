// Operations of a warp against plain code: the lanes' layouts of matrix fragments (PTX ISA, "Warp Level
// Matrix Multiply-Accumulate Instructions"), shuffles and votes; and the conversions of 16-bit numbers.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "simt_kernel.h"

namespace specdec::cuda {
namespace {

// [16, 8] C and [8, 8] B as fragments, written out from the PTX ISA: row and column of register i of a lane.
int c_row(int i) { return lane() / 4 + (i >= 2 ? 8 : 0); }
int c_column(int i) { return lane() % 4 * 2 + (i & 1); }

void store_c(const TestBuffers& p, const float (&d)[4]) {
  for (int i = 0; i < 4; ++i) Global<float>(p.out).store(c_row(i) * 8 + c_column(i), d[i]);
}

// A [16, 8] at in[0], B [8, 8] at in[128], C [16, 8] at in[192].
void product_tf32(const TestBuffers& p, SharedArena) {
  const Global<const float> in(p.in);
  const int group = lane() / 4, index = lane() % 4;
  float a[4], b[2], d[4];
  for (int i = 0; i < 4; ++i) {
    const int row = i == 0 || i == 2 ? group : group + 8, column = i < 2 ? index : index + 4;
    a[i] = to_tf32(in.load(row * 8 + column));
  }
  for (int i = 0; i < 2; ++i) b[i] = to_tf32(in.load(128 + (i == 0 ? index : index + 4) * 8 + group));
  for (int i = 0; i < 4; ++i) d[i] = in.load(192 + c_row(i) * 8 + c_column(i));
  mma_tf32(d, a, b);
  store_c(p, d);
}

// Through load_matrix: A [16, 16] at narrow[0], row-major; B [16, 8] at narrow[256], row-major; C = in[192].
void product_bf16(const TestBuffers& p, SharedArena shared) {
  constexpr int kPitch = 24;  // no bank conflicts
  const Shared<bfloat16> s_a = shared.take<bfloat16>(16 * kPitch), s_b = shared.take<bfloat16>(16 * 8);
  const Global<const bfloat16> narrow(p.narrow);
  for (int i = lane(); i < 256; i += 32) s_a.store(i / 16 * kPitch + i % 16, narrow.load(i));
  for (int i = lane(); i < 128; i += 32) s_b.store(i, narrow.load(256 + i));
  barrier();
  uint32_t a[4], b[2];
  load_matrix(a, s_a, lane() % 16 * kPitch + lane() / 16 * 8);
  load_matrix_transposed(b, s_b, lane() % 16 * 8);
  float d[4];
  for (int i = 0; i < 4; ++i) d[i] = Global<const float>(p.in).load(192 + c_row(i) * 8 + c_column(i));
  mma_bf16(d, a, b);
  store_c(p, d);
}

// The same with registers filled by hand.
void product_bf16_by_hand(const TestBuffers& p, SharedArena) {
  const Global<const bfloat16> narrow(p.narrow);
  const int group = lane() / 4, index = lane() % 4;
  uint32_t a[4], b[2];
  for (int i = 0; i < 4; ++i) {
    const int row = group + (i % 2) * 8, column = index * 2 + (i / 2) * 8;
    a[i] = pack_bf16(float_of(narrow.load(row * 16 + column)), float_of(narrow.load(row * 16 + column + 1)));
  }
  for (int i = 0; i < 2; ++i) {
    const int k = index * 2 + i * 8;
    b[i] = pack_bf16(float_of(narrow.load(256 + k * 8 + group)),
                     float_of(narrow.load(256 + (k + 1) * 8 + group)));
  }
  float d[4];
  for (int i = 0; i < 4; ++i) d[i] = Global<const float>(p.in).load(192 + c_row(i) * 8 + c_column(i));
  mma_bf16(d, a, b);
  store_c(p, d);
}

template <TestBody Kernel>
void check_product(int depth, bool narrow) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  TestSession session;
  for (float& x : session.in) x = normal(random);
  for (bfloat16& x : session.narrow) x = round_to<bfloat16>(normal(random));
  session.run<Kernel, 32>();
  EXPECT_TRUE(session.report.clean()) << session.report.to_string();
  EXPECT_LE(session.report.kernels.at(0).shared.worst, 2);
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 8; ++j) {
      const auto element = [&](int at) {
        const auto u = static_cast<size_t>(at);
        return static_cast<double>(narrow ? float_of(session.narrow[u]) : to_tf32(session.in[u]));
      };
      double sum = session.in[static_cast<size_t>(192 + i * 8 + j)];
      for (int k = 0; k < depth; ++k) sum += element(i * depth + k) * element(16 * depth + k * 8 + j);
      EXPECT_EQ(session.out[static_cast<size_t>(i * 8 + j)], static_cast<float>(sum)) << i << ", " << j;
    }
  }
}

TEST(SimtWarp, ProductTf32) { check_product<product_tf32>(8, false); }
TEST(SimtWarp, ProductBf16ThroughLoadMatrix) { check_product<product_bf16>(16, true); }
TEST(SimtWarp, ProductBf16ByHand) { check_product<product_bf16_by_hand>(16, true); }

// Tensor cores take the upper 19 bits of what they get.
void untidy_tf32(const TestBuffers& p, SharedArena) {
  float d[4] = {};
  const float x = 1.0f + 0x1p-12f;
  mma_tf32(d, {x, x, x, x}, {1.0f, 1.0f});
  store_c(p, d);
}

TEST(SimtWarp, Tf32DropsLowBits) {
  TestSession session;
  session.run<untidy_tf32, 32>();
  for (size_t i = 0; i < 128; ++i) EXPECT_EQ(session.out[i], 8.0f);
  EXPECT_EQ(to_tf32(1.0f + 0x1p-11f), 1.0f + 0x1p-10f);
  EXPECT_EQ(to_tf32(-1.0f - 0x1p-12f), -1.0f);
}

void shuffles(const TestBuffers& p, SharedArena) {
  const Global<float> out(p.out);
  const auto x = static_cast<float>(thread());
  out.store(thread(), shuffle(x, 7));
  out.store(64 + thread(), shuffle_xor(x, 5));
  out.store(128 + thread(), shuffle_down(x, 30));
  out.store(192 + thread(), static_cast<float>(shuffle(thread(), lane() / 2)));
  const uint32_t votes = ballot(lane() % 3 == 0);
  out.store(256 + thread(), static_cast<float>(votes >> lane() & 1u));
  out.store(320 + thread(), any(thread() == 40) ? 1.0f : 0.0f);
  out.store(384 + thread(), all(thread() != 40) ? 1.0f : 0.0f);
}

TEST(SimtWarp, ShufflesAndVotes) {
  TestSession session;
  session.run<shuffles, 64>();
  EXPECT_TRUE(session.report.clean()) << session.report.to_string();
  for (int t = 0; t < 64; ++t) {
    const int base = t / 32 * 32, lane = t % 32;
    const auto out = [&](int at) { return static_cast<int>(session.out[static_cast<size_t>(at + t)]); };
    EXPECT_EQ(out(0), base + 7);
    EXPECT_EQ(out(64), base + (lane ^ 5));
    EXPECT_EQ(out(128), lane < 2 ? t + 30 : t);
    EXPECT_EQ(out(192), base + lane / 2);
    EXPECT_EQ(out(256), lane % 3 == 0 ? 1 : 0);
    EXPECT_EQ(out(320), t / 32);
    EXPECT_EQ(out(384), t / 32 == 1 ? 0 : 1);
  }
}

// Rounding is to the nearest of the two neighbours, to the even one where they are equally near.
template <typename T>
void check_rounding(float largest) {
  std::mt19937 random(5);
  std::uniform_real_distribution<float> exponent(-28.0f, std::log2(largest)), mantissa(-1.0f, 1.0f);
  for (int i = 0; i < 20000; ++i) {
    const float x = std::ldexp(mantissa(random), static_cast<int>(exponent(random)));
    const T rounded = round_to<T>(x);
    const double error = std::abs(static_cast<double>(float_of(rounded)) - x);
    for (const int step : {-1, 1}) {
      T neighbour = rounded;
      neighbour.bits = static_cast<uint16_t>(neighbour.bits + step);
      const double other = std::abs(static_cast<double>(float_of(neighbour)) - x);
      EXPECT_FALSE(other < error) << x;
      EXPECT_TRUE(other != error || rounded.bits % 2 == 0) << x;
    }
  }
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    T value;
    value.bits = static_cast<uint16_t>(bits);
    const float x = float_of(value);
    if (std::isnan(x)) {
      EXPECT_TRUE(std::isnan(float_of(round_to<T>(x))));
    } else {
      EXPECT_EQ(round_to<T>(x).bits, bits);
    }
  }
}

TEST(SimtWarp, Bfloat16) { check_rounding<bfloat16>(0x1p127f); }

TEST(SimtWarp, Half) {
  check_rounding<half>(0x1p15f);
  EXPECT_EQ(round_to<half>(65519.0f).bits, 0x7bff);
  EXPECT_EQ(round_to<half>(65520.0f).bits, 0x7c00);
  EXPECT_EQ(round_to<half>(-1e30f).bits, 0xfc00);
}

}  // namespace
}  // namespace specdec::cuda
