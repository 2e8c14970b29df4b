// tree_attention against float64 and against decoding a path's tokens one by one. Included by the tests of a
// backend, which define before
//   call(params)     its status
//   run(params)      expects success
//   cases()          what it is to follow
//   kBoundaries      committed tokens around the ends of its blocks of keys
#pragma once

#include "attention_problem.h"

namespace specdec::attention_test {
namespace {

TEST(TreeAttention, FollowsReference) {
  unsigned seed = 0;
  for (const Case& c : cases()) {
    SCOPED_TRACE(testing::Message() << "N " << c.N << " heads " << c.HQ << "/" << c.HK << " D " << c.D
                                    << " prefix " << c.prefix << " committed " << c.committed << " dtype "
                                    << static_cast<int>(c.dtype));
    Problem problem(c, seed++);
    run(problem.params());
    problem.expect_reference();
  }
}

TEST(TreeAttention, PaddingIsZeroAndUnread) {
  Case c;
  c.B = 4, c.N = 6;
  Problem problem(c, 7);
  problem.slots[1] = -1;
  problem.lengths = {3, 6, 0, 99};
  for (const int64_t n : {3, 4, 5}) {
    problem.parents[n] = 1 << 30;
    for (int64_t d = 0; d < c.D; ++d) problem.k.set(n * c.HK * problem.stride() + d, test::kNaN);
  }
  run(problem.params());
  problem.expect_reference();
}

TEST(TreeAttention, NoRowsNoNodes) {
  for (const auto& [B, N] : {std::pair<int64_t, int64_t>{0, 4}, {3, 0}}) {
    Case c;
    c.B = B, c.N = N;
    Problem problem(c, 1);
    run(problem.params());
  }
}

// A node's bits are those of its own token, decoded alone when the tokens above it have been committed:
// wherever the path passes from cache to tree, and whatever else the tree holds.
TEST(TreeAttention, NodesAreBitEqualToDecoding) {
  unsigned seed = 20;
  for (const int64_t committed : kBoundaries) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      Case c;
      c.B = 1, c.N = 14, c.HQ = 6, c.prefix = 4, c.committed = committed, c.dtype = dtype, c.gap = 0;
      Problem tree(c, seed++);
      run(tree.params());
      for (int64_t n = 0; n < c.N; ++n) {
        const std::vector<int64_t> path = tree.path_to(0, n);
        Case alone = c;
        alone.N = 1, alone.prefix = 0, alone.tree = false;
        alone.committed = committed + static_cast<int64_t>(path.size()) - 1;
        Problem decoded(alone, 1);
        const auto copy = [&](const test::Buffer& from, int64_t at, test::Buffer* to, int64_t there,
                              int64_t count) {
          for (int64_t i = 0; i < count; ++i) to->set(there + i, static_cast<float>(from[at + i]));
        };
        copy(tree.q, n * c.HQ * c.D, &decoded.q, 0, c.HQ * c.D);
        for (int64_t hk = 0; hk < c.HK; ++hk) {
          const auto keys = tree.keys(0, n, hk);
          for (size_t t = 0; t < keys.size(); ++t) {
            const bool last = t + 1 == keys.size();
            const int64_t there =
                last ? hk * c.D : decoded.cache_at(decoded.slots[0], hk, static_cast<int64_t>(t));
            copy(*keys[t].k, keys[t].at, last ? &decoded.k : &decoded.k_cache, there, c.D);
            copy(*keys[t].v, keys[t].at, last ? &decoded.v : &decoded.v_cache, there, c.D);
          }
        }
        run(decoded.params());
        for (int64_t i = 0; i < c.HQ * c.D; ++i) {
          ASSERT_EQ(decoded.out[i], tree.out[n * c.HQ * c.D + i])
              << "committed " << committed << " node " << n << " at " << i;
        }
      }
    }
  }
}

TEST(TreeAttention, RefusesWhatItCannotRun) {
  Problem problem(Case{}, 1);
  TreeAttentionParams p = problem.params();
  p.D = 24;
  EXPECT_EQ(call(p), Status::kUnsupported);
  p = problem.params();
  p.N = kMaxAttentionNodes + 1;
  EXPECT_EQ(call(p), Status::kUnsupported);
  p = problem.params();
  p.HK = 3;
  EXPECT_EQ(call(p), Status::kInvalidArgument);
}

}  // namespace
}  // namespace specdec::attention_test
