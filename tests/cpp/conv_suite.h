// conv_verify and conv_commit against a float64 reference that follows parents one by one. Included by the
// tests of a backend, which define before
//   call(params)     its status
//   run(params)      expects success; of ConvVerifyParams and ConvCommitParams both
//   cases()          what it is to follow
//   kTypes           of inputs and windows that it takes
//   kLongChain       nodes of a chain that it cuts
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "conv_problem.h"

namespace specdec::conv_test {
namespace {

using test::kNaN;

// An accepted path of every row into inputs of their own.
struct Round {
  Round(Problem& problem, int64_t nodes, std::vector<int32_t> path_lengths)
      : nodes(nodes), lengths(std::move(path_lengths)) {
    const Case& c = problem.c;
    problem.fill(x, c.B * nodes * problem.x_stride);
    for (size_t i = 0; i < x.size(); ++i) {
      if (static_cast<int64_t>(i) % problem.x_stride >= c.C) x[i] = kNaN;
    }
    input = problem.view(x, &typed, nodes);
    longest = nodes - 1;
    for (int64_t b = 0; b < c.B; ++b) {
      // All nodes but one, in order; what lies beyond the length is no node at all.
      const int64_t skipped = static_cast<int64_t>(problem.rng() % nodes);
      for (int64_t i = 0; i < longest; ++i) {
        path.push_back(i < lengths[b] ? static_cast<int32_t>(i + (i >= skipped)) : 1 << 30);
      }
    }
  }
  PathView view() const { return {path.data(), lengths.data(), longest}; }

  int64_t nodes, longest;
  std::vector<int32_t> lengths, path;
  std::vector<float> x;
  test::Buffer typed;
  ConvInputView input;
};

// What the state must be after `round`.
std::vector<float> moved(const Problem& problem, const Round& round) {
  const Case& c = problem.c;
  std::vector<float> state = problem.state;
  for (int64_t b = 0; b < c.B; ++b) {
    if (problem.slots[b] < 0) continue;
    std::vector<float> rows;  // the old window, then the accepted inputs
    const float* window = &problem.state[problem.slots[b] * problem.slot_stride];
    rows.assign(window, window + (c.W - 1) * c.C);
    for (int32_t i = 0; i < round.lengths[b]; ++i) {
      const float* x = &round.x[(b * round.nodes + round.path[b * round.longest + i]) * problem.x_stride];
      rows.insert(rows.end(), x, x + c.C);
    }
    std::copy(rows.end() - (c.W - 1) * c.C, rows.end(),
              state.begin() + problem.slots[b] * problem.slot_stride);
  }
  return state;
}

// The same bits, whatever the bits of what is no number.
bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
    return std::memcmp(&x, &y, sizeof(float)) == 0 || (std::isnan(x) && std::isnan(y));
  });
}

TEST(ConvVerify, FollowsReference) {
  unsigned seed = 0;
  for (const Case& c : cases()) {
    SCOPED_TRACE(testing::Message() << "W " << c.W << " C " << c.C << " N " << c.N << " prefix " << c.prefix
                                    << " dtype " << static_cast<int>(c.dtype));
    Problem problem(c, seed++);
    run(problem.params());
    problem.collect();
    problem.expect_reference();
  }
}

TEST(ConvVerify, PaddingIsZeroAndUnread) {
  for (const int64_t gap : {5, 8}) {
    Case c;
    c.B = 4, c.N = 6, c.tree = true, c.C = 40, c.gap = gap;
    Problem problem(c, 7);
    problem.slots[1] = -1;
    problem.lengths = {3, 6, 0, 99};
    for (const int64_t n : {3, 4, 5}) {
      std::fill_n(&problem.x[n * problem.x_stride], c.C, kNaN);
      problem.parents[n] = 1 << 30;
    }
    run(problem.params());
    problem.expect_reference();
  }
}

TEST(ConvVerify, NoRowsNoNodes) {
  for (const auto& [B, N] : {std::pair<int64_t, int64_t>{0, 4}, {3, 0}}) {
    Case c;
    c.B = B, c.N = N;
    Problem problem(c, 1);
    run(problem.params());
  }
}

// A stream cut anywhere, each piece with the deferred commit of the piece before, gives the bits of one call,
// which is itself cut into chunks.
TEST(ConvVerify, SplitsAreBitEqual) {
  for (const int64_t W : {2, 4, 7}) {
    Case c;
    c.N = kLongChain, c.C = 40, c.W = W, c.gap = 8;
    Problem whole(c, 3);
    run(whole.params());
    whole.expect_reference();
    std::vector<float> pieces(whole.y.size(), kNaN);
    std::vector<float> state = whole.state;
    const std::vector<float> want = whole.y;
    int64_t done = 0, last = 0;
    while (done < c.N) {
      const int64_t n = std::min<int64_t>(1 + whole.rng() % 40, c.N - done);
      ConvVerifyParams p = whole.params();
      p.N = n;
      p.lengths = nullptr;
      p.state.data = state.data();
      p.x.x = whole.x.data() + done * whole.x_stride;
      p.x.nodes = n;
      p.x.stride_b = n * whole.x_stride;
      p.y = pieces.data() + done * c.C;
      p.has_pending = last > 0;
      p.pending = p.x;
      p.pending.x = whole.x.data() + (done - last) * whole.x_stride;
      p.pending.nodes = last;
      p.pending.stride_b = last * whole.x_stride;
      p.pending_path.max_length = last;
      run(p);
      done += n;
      last = n;
    }
    EXPECT_TRUE(same(pieces, want)) << "W " << W;
  }
}

// A node's bits are those of the chain of its ancestors alone, whatever else the call holds and however it is
// cut.
TEST(ConvVerify, TreeNodesAreBitEqualToTheirPaths) {
  Case c;
  c.N = 24, c.C = 40, c.tree = true, c.gap = 8;
  Problem tree(c, 11);
  const ConvVerifyParams p = tree.params();
  run(p);
  const std::vector<float> want = tree.y;
  for (int64_t leaf = 0; leaf < c.N; ++leaf) {
    std::vector<int64_t> path;
    for (int64_t n = leaf; n >= 0; n = tree.parents[n]) path.insert(path.begin(), n);
    std::vector<float> x, y(path.size() * c.C);
    for (const int64_t n : path) {
      x.insert(x.end(), &tree.x[n * tree.x_stride], &tree.x[n * tree.x_stride] + c.C);
    }
    ConvVerifyParams chain = p;
    chain.N = static_cast<int64_t>(path.size());
    chain.parents = nullptr;
    chain.lengths = nullptr;
    chain.x = {x.data(), DType::kFloat32, chain.N, chain.N * c.C, c.C};
    chain.y = y.data();
    run(chain);
    EXPECT_EQ(std::memcmp(&y[y.size() - c.C], &want[leaf * c.C], c.C * sizeof(float)), 0) << "node " << leaf;
  }
}

// Verify with pending equals conv_commit and then verify, outputs and window, to the bit.
TEST(ConvVerify, PendingEqualsCommitFirst) {
  unsigned seed = 20;
  for (const auto& [dtype, state_type] : kTypes) {
    for (const int64_t W : {2, 4, 16}) {
      for (const int64_t gap : {5, 8}) {
        Case c;
        c.B = 5, c.N = 5, c.C = 72, c.W = W, c.tree = true, c.dtype = dtype, c.state = state_type,
        c.gap = gap;
        Problem problem(c, seed++);
        problem.lengths = {0, 5, 5, 2, 5};  // the window moves on where nothing is verified, too
        problem.slots[2] = -1;
        Round round(problem, 7, {2, 0, 3, 6, 1});
        const std::vector<float> before = problem.state, want_state = moved(problem, round);

        ConvCommitParams commit;
        commit.B = c.B, commit.C = c.C, commit.W = c.W;
        commit.x = round.input;
        commit.path = round.view();
        commit.state = problem.params().state;
        commit.slots = problem.slots.data();
        run(commit);
        problem.collect();
        EXPECT_TRUE(same(problem.state, want_state)) << "W " << W;
        run(problem.params());
        problem.collect();
        problem.expect_reference();
        const std::vector<float> want = problem.y;

        problem.state = before;
        ConvVerifyParams p = problem.params();
        p.has_pending = true;
        p.pending = round.input;
        p.pending_path = round.view();
        run(p);
        problem.collect();
        EXPECT_TRUE(same(problem.state, want_state)) << "W " << W;
        EXPECT_TRUE(same(problem.y, want)) << "W " << W;
      }
    }
  }
}

TEST(ConvVerify, RefusesWhatItCannotRun) {
  Problem problem(Case{}, 1);
  ConvVerifyParams p = problem.params();
  p.W = 17;
  EXPECT_EQ(call(p), Status::kUnsupported);
  p = problem.params();
  p.state.dtype = DType::kBFloat16;
  EXPECT_EQ(call(p), Status::kUnsupported);
  p = problem.params();
  p.has_pending = p.has_prefix = true;
  EXPECT_EQ(call(p), Status::kInvalidArgument);
}

}  // namespace
}  // namespace specdec::conv_test
