// conv_verify and conv_commit of the CPU backend.
#include <gtest/gtest.h>

#include <cstring>
#include <utility>
#include <vector>

#include "conv_problem.h"
#include "ops.h"

namespace specdec::conv_test {
namespace {

Status call(const ConvVerifyParams& p) { return cpu::conv_verify(p); }
void run(const ConvVerifyParams& p) { ASSERT_EQ(cpu::conv_verify(p), Status::kOk); }
void run(const ConvCommitParams& p) { ASSERT_EQ(cpu::conv_commit(p), Status::kOk); }

constexpr int64_t kLongChain = 1000;
constexpr std::pair<DType, DType> kTypes[] = {{DType::kFloat32, DType::kFloat32},
                                              {DType::kBFloat16, DType::kBFloat16},
                                              {DType::kBFloat16, DType::kFloat32}};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int64_t W : {1, 2, 3, 4, 5, 8, 16}) {
    for (const int64_t C : {1, 15, 16, 33, 300}) {
      for (const bool tree : {false, true}) {
        const auto i = static_cast<int64_t>(all.size());
        Case c;
        c.B = 2, c.N = 1 + i % 9, c.C = C, c.W = W, c.tree = tree;
        c.bias = i % 2 > 0, c.silu = i % 3 > 0, c.prefix = i % 4 == 3 ? 5 : 0;
        all.push_back(c);
      }
    }
  }
  return all;
}

}  // namespace
}  // namespace specdec::conv_test

#include "conv_suite.h"

namespace specdec::conv_test {
namespace {

// bfloat16 in and out, by truncation of values that are exact in it and by rounding to nearest even.
uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
float from_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// bfloat16 input with a bfloat16 or a float32 window computes in float32 and rounds once.
TEST(ConvVerify, BFloat16RoundsOnce) {
  for (const bool wide_state : {false, true}) {
    Case c;
    c.N = 7, c.C = 50, c.tree = true;
    Problem problem(c, 31);
    for (auto* buffer : {&problem.x, &problem.state}) {
      for (float& e : *buffer) e = from_bf16(to_bf16(e));
    }
    ConvVerifyParams p = problem.params();
    ASSERT_EQ(cpu::conv_verify(p), Status::kOk);
    std::vector<uint16_t> x, state, y(problem.y.size());
    for (const float e : problem.x) x.push_back(to_bf16(e));
    for (const float e : problem.state) state.push_back(to_bf16(e));
    p.x.x = x.data();
    p.x.dtype = DType::kBFloat16;
    if (!wide_state) {
      p.state.data = state.data();
      p.state.dtype = DType::kBFloat16;
    }
    p.y = y.data();
    ASSERT_EQ(cpu::conv_verify(p), Status::kOk);
    for (size_t i = 0; i < y.size(); ++i) ASSERT_EQ(y[i], to_bf16(problem.y[i])) << i;
  }
}

}  // namespace
}  // namespace specdec::conv_test
