// conv_verify and conv_commit against a float64 reference that follows parents one by one.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "conv_problem.h"
#include "ops.h"

namespace specdec {
namespace {

using conv_test::Case;
using conv_test::Problem;
using test::kNaN;

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

// The CPU's y against the formula.
void expect_reference(Problem& problem) {
  ASSERT_EQ(cpu::conv_verify(problem.params()), Status::kOk);
  problem.expect_reference();
}

TEST(ConvVerify, FollowsReference) {
  unsigned seed = 0;
  for (const int64_t W : {1, 2, 3, 4, 5, 8, 16}) {
    for (const int64_t C : {1, 15, 16, 33, 300}) {
      for (const bool tree : {false, true}) {
        Case c;
        c.B = 2, c.N = 1 + seed % 9, c.C = C, c.W = W, c.tree = tree;
        c.bias = seed % 2, c.silu = seed % 3 > 0, c.prefix = seed % 4 == 3 ? 5 : 0;
        SCOPED_TRACE(testing::Message() << "W " << W << " C " << C << " N " << c.N << " prefix " << c.prefix);
        Problem problem(c, seed++);
        expect_reference(problem);
      }
    }
  }
}

TEST(ConvVerify, PaddingIsZeroAndUnread) {
  Case c;
  c.B = 4, c.N = 6, c.tree = true;
  Problem problem(c, 7);
  problem.slots[1] = -1;
  problem.lengths = {3, 6, 0, 99};
  for (const int64_t n : {3, 4, 5}) {
    std::fill_n(&problem.x[n * problem.x_stride], c.C, kNaN);
    problem.parents[n] = 1 << 30;
  }
  std::fill_n(&problem.x[2 * c.N * problem.x_stride], c.N * problem.x_stride, kNaN);
  expect_reference(problem);
}

TEST(ConvVerify, NoRowsNoNodes) {
  for (const auto& [B, N] : {std::pair<int64_t, int64_t>{0, 4}, {3, 0}}) {
    Case c;
    c.B = B, c.N = N;
    Problem problem(c, 1);
    ASSERT_EQ(cpu::conv_verify(problem.params()), Status::kOk);
  }
}

// A stream cut anywhere, each piece with the deferred commit of the piece before, gives the bits of one call.
TEST(ConvVerify, SplitsAreBitEqual) {
  for (const int64_t W : {2, 4, 7}) {
    Case c;
    c.N = 1000, c.C = 40, c.W = W;
    Problem whole(c, 3);
    ASSERT_EQ(cpu::conv_verify(whole.params()), Status::kOk);
    std::vector<float> pieces(whole.y.size(), kNaN);
    std::vector<float> state = whole.state;
    int64_t done = 0, last = 0;
    while (done < c.N) {
      const int64_t n = std::min<int64_t>(1 + whole.rng() % 9, c.N - done);
      ConvVerifyParams p = whole.params();
      p.N = n;
      p.lengths = nullptr;
      p.state.data = state.data();
      p.x.x = whole.x.data() + done * whole.x_stride;
      p.x.nodes = n;
      p.y = pieces.data() + done * c.C;
      p.has_pending = last > 0;
      p.pending = p.x;
      p.pending.x = whole.x.data() + (done - last) * whole.x_stride;
      p.pending.nodes = last;
      p.pending_path.max_length = last;
      ASSERT_EQ(cpu::conv_verify(p), Status::kOk);
      done += n;
      last = n;
    }
    ASSERT_EQ(cpu::conv_verify(whole.params()), Status::kOk);
    EXPECT_EQ(std::memcmp(pieces.data(), whole.y.data(), pieces.size() * sizeof(float)), 0) << "W " << W;
  }
}

// A node's bits are those of the chain of its ancestors alone.
TEST(ConvVerify, TreeNodesAreBitEqualToTheirPaths) {
  Case c;
  c.N = 24, c.C = 37, c.tree = true;
  Problem tree(c, 11);
  const ConvVerifyParams p = tree.params();
  ASSERT_EQ(cpu::conv_verify(p), Status::kOk);
  const std::vector<float> want = tree.y;
  for (int64_t leaf = 0; leaf < c.N; ++leaf) {
    std::vector<int64_t> path;
    for (int64_t n = leaf; n >= 0; n = tree.parents[n]) path.insert(path.begin(), n);
    std::vector<float> x, y(path.size() * c.C);
    for (const int64_t n : path)
      x.insert(x.end(), &tree.x[n * tree.x_stride], &tree.x[n * tree.x_stride] + c.C);
    ConvVerifyParams chain = p;
    chain.N = static_cast<int64_t>(path.size());
    chain.parents = nullptr;
    chain.lengths = nullptr;
    chain.x = {x.data(), DType::kFloat32, chain.N, chain.N * c.C, c.C};
    chain.y = y.data();
    ASSERT_EQ(cpu::conv_verify(chain), Status::kOk);
    EXPECT_EQ(std::memcmp(&y[y.size() - c.C], &want[leaf * c.C], c.C * sizeof(float)), 0) << "node " << leaf;
  }
}

// Verify with pending equals conv_commit and then verify, outputs and window, to the bit.
TEST(ConvVerify, PendingEqualsCommitFirst) {
  for (const int64_t accepted : {0, 1, 2, 5}) {
    Case c;
    c.B = 2, c.N = 5, c.tree = true;
    Problem problem(c, 20 + static_cast<unsigned>(accepted));
    problem.lengths = {0, 5};  // the window advances where nothing is verified, too
    std::vector<float> before;
    problem.fill(before, c.B * 6 * c.C);
    const std::vector<int32_t> path = {0, 1, 2, 4, 5, 0, 2, 3, 4, 5};
    const std::vector<int32_t> path_lengths(2, static_cast<int32_t>(accepted));
    const std::vector<float> state = problem.state;

    ConvCommitParams commit;
    commit.B = c.B, commit.C = c.C, commit.W = c.W;
    commit.x = {before.data(), DType::kFloat32, 6, 6 * c.C, c.C};
    commit.path = {path.data(), path_lengths.data(), 5};
    commit.state = problem.params().state;
    commit.slots = problem.slots.data();
    ASSERT_EQ(cpu::conv_commit(commit), Status::kOk);
    expect_reference(problem);
    const std::vector<float> want_state = problem.state, want = problem.y;

    problem.state = state;
    ConvVerifyParams p = problem.params();
    p.has_pending = true;
    p.pending = commit.x;
    p.pending_path = commit.path;
    ASSERT_EQ(cpu::conv_verify(p), Status::kOk);
    EXPECT_EQ(std::memcmp(problem.state.data(), want_state.data(), state.size() * sizeof(float)), 0);
    EXPECT_EQ(std::memcmp(problem.y.data(), want.data(), want.size() * sizeof(float)), 0);
  }
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

TEST(ConvVerify, RefusesWhatItCannotRun) {
  Problem problem(Case{}, 1);
  ConvVerifyParams p = problem.params();
  p.W = 17;
  EXPECT_EQ(cpu::conv_verify(p), Status::kUnsupported);
  p = problem.params();
  p.state.dtype = DType::kBFloat16;
  EXPECT_EQ(cpu::conv_verify(p), Status::kUnsupported);
  p = problem.params();
  p.has_pending = p.has_prefix = true;
  EXPECT_EQ(cpu::conv_verify(p), Status::kInvalidArgument);
}

}  // namespace
}  // namespace specdec
