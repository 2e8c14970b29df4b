// Exact verification and commits: against a float64 recurrence, and bit for bit against stepping token by
// token. Included by the tests of a backend, which define TestProblem, a Problem that calls it, and
// instantiate VerifyTest.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "recurrence_problem.h"

namespace specdec::test {
namespace {

// A random forest over `nodes` nodes whose ids start at `offset`; parents are any earlier id.
std::vector<int32_t> random_parents(Problem& p, int64_t nodes, int64_t offset, int64_t fan_out) {
  std::vector<int32_t> parents(p.shape.B * nodes);
  for (int64_t b = 0; b < p.shape.B; ++b) {
    for (int64_t n = 0; n < nodes; ++n) {
      const int64_t id = offset + n;
      const int64_t back = 1 + p.below(std::min<int64_t>(fan_out, id + 1));
      parents[b * nodes + n] = static_cast<int32_t>(std::max<int64_t>(id - back, -1));
    }
  }
  return parents;
}

std::vector<int32_t> path_to(const int32_t* parents, int64_t node) {
  std::vector<int32_t> path;
  for (int64_t n = node; n >= 0; n = parents[n]) path.push_back(static_cast<int32_t>(n));
  std::reverse(path.begin(), path.end());
  return path;
}

// out, u, k and g of node `i` in `a` and node `j` in `b` carry the same bits in every sequence.
void expect_same_node(const Problem& p, const Outputs& a, int64_t na, int64_t i, const Outputs& b, int64_t nb,
                      int64_t j, int64_t row) {
  const auto same = [&](const Buffer& x, const Buffer& y, int64_t width, const char* name) {
    const int64_t size = x.dtype == DType::kFloat32 ? 4 : 2;
    const char* left = static_cast<const char*>(x.data()) + (row * na + i) * width * size;
    const char* right = static_cast<const char*>(y.data()) + (row * nb + j) * width * size;
    EXPECT_EQ(std::memcmp(left, right, width * size), 0) << name << " of node " << i << ", sequence " << row;
  };
  const Shape& s = p.shape;
  same(a.out, b.out, s.HV * s.DV, "out");
  same(a.u, b.u, s.HV * s.DV, "u");
  same(a.k, b.k, s.HK * s.DK, "k");
  if (p.decays > 0) same(a.g, b.g, s.HV * p.decays, "g");
}

void expect_same(const Outputs& a, const Outputs& b) {
  EXPECT_TRUE(same_bits(a.out, b.out)) << "out";
  EXPECT_TRUE(same_bits(a.u, b.u)) << "u";
  EXPECT_TRUE(same_bits(a.k, b.k)) << "k";
  EXPECT_TRUE(same_bits(a.g, b.g)) << "g";
}

// Decodes `tokens` one at a time from `state` (advanced in place); one Outputs a token.
std::vector<Outputs> decode(const Problem& p, Buffer& state, const std::vector<int32_t>& tokens) {
  std::vector<Outputs> steps;
  for (const int32_t n : tokens) {
    steps.push_back(p.run(p.params(state, n, 1)));
    PathView path;
    path.max_length = 1;
    EXPECT_EQ(p.call(p.commit_params(state, p.factors(steps.back(), 1), path)), Status::kOk);
  }
  return steps;
}

std::vector<int32_t> range(int64_t first, int64_t count) {
  std::vector<int32_t> out(count);
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int32_t>(first + i);
  return out;
}

std::string name_of(const testing::TestParamInfo<Shape>& info) {
  const char* gates[] = {"none", "head", "channel"};
  const char* updates[] = {"additive", "delta"};
  return std::string(gates[static_cast<int>(info.param.gate)]) + "_" +
         updates[static_cast<int>(info.param.update)] + "_" + std::to_string(info.param.DK) + "x" +
         std::to_string(info.param.DV);
}

class VerifyTest : public testing::TestWithParam<Shape> {};

// A sum of DK products is off by at most DK units of 2^-24 times the sum of magnitudes, which is of the order
// of sqrt(DK) here (entries of the state around 1, keys of at most about unit length), and mostly by sqrt(DK)
// units; a token inherits the errors of the tokens before it. Halved activations add their own rounding of
// the output.
double tolerance(const Shape& s) { return 0x1p-24 * s.DK * std::sqrt(s.DK) * s.N; }
double rounding(DType dtype) {
  return dtype == DType::kFloat32 ? 0x1p-24 : dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
}

// Outputs and factors of the forests `parents` [B, N] against the float64 recurrence.
void expect_float64(const Problem& p, const Outputs& o, const std::vector<int32_t>& parents) {
  const Shape& s = p.shape;
  for (int64_t b = 0; b < s.B; ++b) {
    for (int64_t hv = 0; hv < s.HV; ++hv) {
      const Reference root(p, p.state, p.state_at(b, hv), b, hv);
      std::vector<Reference> nodes;  // the state after every node
      for (int64_t n = 0; n < s.N; ++n) {
        const int32_t parent = parents[b * s.N + n];
        nodes.push_back(parent < 0 ? root : nodes[parent]);
        const Step want = nodes.back().step(n);
        for (int64_t r = 0; r < s.DV; ++r) {
          const int64_t at = ((b * s.N + n) * s.HV + hv) * s.DV + r;
          ASSERT_NEAR(o.out[at], want.out[r],
                      tolerance(s) + rounding(s.dtype) * std::fabs(want.out[r]) + 0x1p-24);
          ASSERT_NEAR(o.u[at], want.u[r], tolerance(s));
        }
        for (int64_t c = 0; c < s.DK; ++c) {
          ASSERT_NEAR(o.k[((b * s.N + n) * s.HK + hv / (s.HV / s.HK)) * s.DK + c], want.k[c], 0x1p-24 * s.DK);
        }
        for (int64_t c = 0; c < p.decays; ++c) {
          ASSERT_EQ(o.g[((b * s.N + n) * s.HV + hv) * p.decays + c], p.g.buffer[p.g.at(b, n, hv, c)]);
        }
      }
    }
  }
}

TEST_P(VerifyTest, ForestMatchesFloat64) {
  for (const DType state : {DType::kFloat32, DType::kBFloat16}) {
    for (const int64_t fan_out : {3, 64}) {
      Shape s = GetParam();
      s.state = state;
      TestProblem p(s, 1 + static_cast<uint32_t>(fan_out));
      const auto parents = random_parents(p, s.N, 0, fan_out);
      const Buffer before = p.state;
      VerifyParams params = p.params(p.state, 0, s.N);
      params.parents = parents.data();
      const Outputs o = p.run(params);
      params.strategy = Strategy::kHybrid;
      expect_same(o, p.run(params));
      EXPECT_TRUE(same_bits(before, p.state)) << "verification wrote the state";
      expect_float64(p, o, parents);
    }
  }
}

// Every node of a tree carries the bits of decoding its path, and committing its path those of the decoded
// state.
TEST_P(VerifyTest, TreeAndCommitEqualDecoding) {
  const Shape s = GetParam();
  TestProblem p(s, 7);
  for (const int64_t fan_out : {1, 2, 5, 64}) {
    auto parents = random_parents(p, s.N, 0, fan_out);
    for (int64_t b = 1; b < s.B; ++b) std::copy_n(parents.begin(), s.N, parents.begin() + b * s.N);
    VerifyParams params = p.params(p.state, 0, s.N);
    params.parents = parents.data();
    const Outputs tree = p.run(params);
    params.strategy = Strategy::kHybrid;
    expect_same(tree, p.run(params));
    for (int64_t leaf = 0; leaf < s.N; leaf += 1 + s.N / 6) {
      const std::vector<int32_t> path = path_to(parents.data(), leaf);
      Buffer decoded = p.state;
      const std::vector<Outputs> steps = decode(p, decoded, path);
      std::vector<int32_t> paths;
      for (int64_t b = 0; b < s.B; ++b) {
        paths.insert(paths.end(), path.begin(), path.end());
        for (size_t i = 0; i < path.size(); ++i) expect_same_node(p, tree, s.N, path[i], steps[i], 1, 0, b);
      }
      Buffer committed = p.state;
      const PathView view{paths.data(), nullptr, static_cast<int64_t>(path.size())};
      ASSERT_EQ(p.call(p.commit_params(committed, p.factors(tree, s.N), view)), Status::kOk);
      EXPECT_TRUE(same_bits(committed, decoded)) << "path of " << path.size();
    }
  }
}

// A stream cut into rounds anywhere, committed eagerly or deferred, ends in the state of decoding.
TEST_P(VerifyTest, SplitsIntoRoundsEqualDecoding) {
  const Shape s = GetParam();
  TestProblem p(s, 11);
  Buffer decoded = p.state;
  const std::vector<Outputs> steps = decode(p, decoded, range(0, s.N));
  for (int trial = 0; trial < 6; ++trial) {
    const bool deferred = trial % 2 == 1;
    Buffer state = p.state;
    Outputs last;
    int64_t last_nodes = 0;
    std::vector<int32_t> accepted;  // of the last round, [B]
    for (int64_t done = 0; done < s.N;) {
      const int64_t drafted = 1 + p.below(s.N - done);
      const int64_t kept = 1 + p.below(drafted);
      VerifyParams params = p.params(state, done, drafted);
      const std::vector<int32_t> lengths = accepted;
      if (deferred && last_nodes > 0) {
        params.has_pending = true;
        params.pending = p.factors(last, last_nodes);
        params.pending_path = {nullptr, lengths.data(), last_nodes};
      }
      const Outputs round = p.run(params);
      for (int64_t b = 0; b < s.B; ++b) {
        for (int64_t n = 0; n < kept; ++n) expect_same_node(p, round, drafted, n, steps[done + n], 1, 0, b);
      }
      last = round;
      last_nodes = drafted;
      accepted.assign(s.B, static_cast<int32_t>(kept));
      done += kept;
      if (!deferred || done == s.N) {
        const PathView view{nullptr, accepted.data(), last_nodes};
        ASSERT_EQ(p.call(p.commit_params(state, p.factors(last, last_nodes), view)), Status::kOk);
      }
    }
    EXPECT_TRUE(same_bits(state, decoded)) << (deferred ? "deferred" : "eager");
  }
}

// Deferred is commit and verify in one pass, a bfloat16 state included (both round once), whatever follows.
TEST_P(VerifyTest, PendingEqualsCommitThenVerify) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
    Shape s = GetParam();
    s.state = type;
    TestProblem p(s, 13);
    const int64_t half = s.N / 2;
    const auto parents = random_parents(p, half, 0, 2);
    const auto next_parents = random_parents(p, s.N - half, 0, 4);
    VerifyParams first = p.params(p.state, 0, half);
    first.parents = parents.data();
    const Outputs drafted = p.run(first);
    std::vector<int32_t> paths(s.B * half, 0), lengths(s.B);
    for (int64_t b = 0; b < s.B; ++b) {
      if (b == 1) continue;  // nothing was accepted in sequence 1
      const auto path = path_to(parents.data() + b * half, p.below(half));
      std::copy(path.begin(), path.end(), paths.begin() + b * half);
      lengths[b] = static_cast<int32_t>(path.size());
    }
    const PathView view{paths.data(), lengths.data(), half};
    for (const Strategy strategy : {Strategy::kSerial, Strategy::kHybrid}) {
      Buffer eager = p.state, deferred = p.state;
      ASSERT_EQ(p.call(p.commit_params(eager, p.factors(drafted, half), view)), Status::kOk);
      VerifyParams then = p.params(eager, half, s.N - half);
      then.parents = next_parents.data();
      then.strategy = strategy;
      const Outputs expected = p.run(then);
      then.state.data = deferred.data();
      then.has_pending = true;
      then.pending = p.factors(drafted, half);
      then.pending_path = view;
      expect_same(p.run(then), expected);
      EXPECT_TRUE(same_bits(eager, deferred));
    }
  }
}

// New nodes below a replayed prefix carry the bits that one verification of the whole tree gives them.
TEST_P(VerifyTest, PrefixEqualsWholeTree) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
    Shape s = GetParam();
    s.state = type;
    TestProblem p(s, 17);
    for (const int64_t fan_out : {1, 3, 64}) {
      const auto parents = random_parents(p, s.N, 0, fan_out);
      VerifyParams all = p.params(p.state, 0, s.N);
      all.parents = parents.data();
      const Outputs whole = p.run(all);
      for (const int64_t np : {int64_t{1}, s.N / 2, s.N - 1}) {
        std::vector<int32_t> before, after;
        for (int64_t b = 0; b < s.B; ++b) {
          before.insert(before.end(), parents.begin() + b * s.N, parents.begin() + b * s.N + np);
          after.insert(after.end(), parents.begin() + b * s.N + np, parents.begin() + (b + 1) * s.N);
        }
        VerifyParams first = p.params(p.state, 0, np);
        first.parents = before.data();
        const Outputs prefix = p.run(first);
        for (const Strategy strategy : {Strategy::kSerial, Strategy::kHybrid}) {
          VerifyParams then = p.params(p.state, np, s.N - np);
          then.parents = after.data();
          then.strategy = strategy;
          then.has_prefix = true;
          then.prefix = p.factors(prefix, np);
          then.prefix_parents = before.data();
          if (fan_out == 1) then.parents = then.prefix_parents = nullptr;  // a chain that continues
          const Buffer untouched = p.state;
          const Outputs o = p.run(then);
          EXPECT_TRUE(same_bits(untouched, p.state));
          for (int64_t b = 0; b < s.B; ++b) {
            for (int64_t n = np; n < s.N; ++n) expect_same_node(p, whole, s.N, n, o, s.N - np, n - np, b);
          }
        }
      }
    }
  }
}

// Slots in any order, padding rows, ragged lengths: nothing is read or written for padding, and a sequence's
// numbers do not depend on its neighbours.
TEST_P(VerifyTest, PaddingAndSlots) {
  Shape s = GetParam();
  s.B = 4;
  TestProblem p(s, 19);
  const Outputs plain = p.run(p.params(p.state, 0, s.N));
  const std::vector<int32_t> slots{5, -1, 0, 2};
  const std::vector<int32_t> lengths{static_cast<int32_t>(s.N + 9), 3, 0, static_cast<int32_t>(s.N - 1)};
  Buffer pool = p.state;
  const int64_t bytes = p.slot_stride * 4;
  for (int64_t i = 0; i < p.pool * p.slot_stride; ++i) pool.set(i, kNaN);
  for (const int64_t b : {0, 3}) {
    std::memcpy(static_cast<char*>(pool.data()) + slots[b] * bytes,
                static_cast<char*>(p.state.data()) + p.slots[b] * bytes, bytes);
  }
  for (const Tensor* t : {&p.q, &p.k, &p.v, &p.g, &p.beta}) {
    if (t->buffer.bytes() == 0) continue;
    Buffer& buffer = const_cast<Buffer&>(t->buffer);
    for (const int64_t b : {1, 2, 3}) {
      for (int64_t i = 0; i < t->heads * t->stride.h; ++i) buffer.set(t->at(b, s.N - 1, 0, i), kNaN);
    }
  }
  const Buffer before = pool;
  VerifyParams params = p.params(pool, 0, s.N);
  params.slots = slots.data();
  params.lengths = lengths.data();
  const Outputs o = p.run(params);
  EXPECT_TRUE(same_bits(pool, before));
  for (int64_t b = 0; b < s.B; ++b) {
    const int64_t length = b == 0 ? s.N : b == 3 ? s.N - 1 : 0;
    for (int64_t n = 0; n < length; ++n) expect_same_node(p, plain, s.N, n, o, s.N, n, b);
    for (int64_t n = length; n < s.N; ++n) {
      for (int64_t i = 0; i < s.HV * s.DV; ++i) {
        ASSERT_EQ(o.out[(b * s.N + n) * s.HV * s.DV + i], 0.0);
        ASSERT_EQ(o.u[(b * s.N + n) * s.HV * s.DV + i], 0.0);
      }
      for (int64_t i = 0; i < s.HK * s.DK; ++i) ASSERT_EQ(o.k[(b * s.N + n) * s.HK * s.DK + i], 0.0);
      for (int64_t i = 0; i < s.HV * p.decays; ++i) ASSERT_EQ(o.g[(b * s.N + n) * s.HV * p.decays + i], 0.0);
    }
  }
  // Commits skip padding rows, and an empty path leaves the bits alone.
  const std::vector<int32_t> accepted{0, 2, -3, 0};
  CommitParams commit = p.commit_params(pool, p.factors(o, s.N), {nullptr, accepted.data(), s.N});
  commit.slots = slots.data();
  for (const CommitMode mode : {CommitMode::kExact, CommitMode::kFast}) {
    commit.mode = mode;
    ASSERT_EQ(p.call(commit), Status::kOk);
    EXPECT_TRUE(same_bits(pool, before));
  }
}

TEST_P(VerifyTest, FastCommitMatchesFloat64) {
  const Shape s = GetParam();
  TestProblem p(s, 23);
  const Outputs o = p.run(p.params(p.state, 0, s.N));
  for (const int64_t m : {int64_t{1}, s.N / 2, s.N}) {
    Buffer state = p.state;
    const std::vector<int32_t> lengths(s.B, static_cast<int32_t>(m));
    CommitParams commit = p.commit_params(state, p.factors(o, s.N), {nullptr, lengths.data(), s.N});
    commit.mode = CommitMode::kFast;
    ASSERT_EQ(p.call(commit), Status::kOk);
    for (int64_t b = 0; b < s.B; ++b) {
      for (int64_t hv = 0; hv < s.HV; ++hv) {
        Reference ref(p, p.state, p.state_at(b, hv), b, hv);
        for (int64_t n = 0; n < m; ++n) ref.step(n);
        for (int64_t i = 0; i < s.DV * s.DK; ++i) {
          ASSERT_NEAR(state[p.state_at(b, hv) + i], ref.state[i], tolerance(s));
        }
      }
    }
  }
}

// With one unit entry in the first row of the state, nothing written and q picking that entry, the output is
// exp(g) itself.
TEST(GateTest, DecayIsExpOfG) {
  Shape s;
  s.update = Update::kAdditive;
  s.N = 64, s.HK = s.HV = 1, s.DK = s.DV = 32;
  s.qk_l2norm = false;
  TestProblem p(s, 29);
  p.scale = 1.0f;
  for (int64_t n = 0; n < s.N; ++n) {
    for (int64_t c = 0; c < s.DK; ++c) {
      p.k.buffer.set(p.k.at(0, n, 0, c), 0.0f);
      p.q.buffer.set(p.q.at(0, n, 0, c), c == 0 ? 1.0f : 0.0f);
    }
    p.v.buffer.set(p.v.at(0, n, 0), 0.0f);
    const float g = n < 60 ? -std::ldexp(1.0f + p.uniform(0, 1), static_cast<int>(n) / 4 - 8) : 0.0f;
    p.g.buffer.set(p.g.at(0, n, 0), g);
  }
  p.g.buffer.set(p.g.at(0, 61, 0), -80.0f);
  p.g.buffer.set(p.g.at(0, 62, 0), -1e4f);
  p.g.buffer.set(p.g.at(0, 63, 0), -INFINITY);
  for (int64_t c = 0; c < s.DK; ++c) p.state.set(p.state_at(0) + c, c == 0 ? 1.0f : 0.5f);
  VerifyParams params = p.params(p.state, 0, s.N);
  const std::vector<int32_t> roots(s.N, -1);
  params.parents = roots.data();
  const Outputs o = p.run(params);
  for (int64_t n = 0; n < s.N; ++n) {
    const double exact = std::exp(p.g.buffer[p.g.at(0, n, 0)]);
    EXPECT_NEAR(o.out[n * s.DV], exact, 0x1.1p-23 * exact + 0x1p-149) << p.g.buffer[p.g.at(0, n, 0)];
  }
  EXPECT_EQ(o.out[60 * s.DV], 1.0);
  EXPECT_EQ(o.out[62 * s.DV], 0.0);
  EXPECT_EQ(o.out[63 * s.DV], 0.0);
}

// A token that forgets everything leaves only its own write, without a NaN, in every kind of commit.
TEST(GateTest, SaturatedGatesForget) {
  for (const Gate gate : {Gate::kHead, Gate::kChannel}) {
    Shape s;
    s.gate = gate;
    s.DV = 32;
    TestProblem p(s, 31);
    for (int64_t hv = 0; hv < s.HV; ++hv) {
      for (int64_t c = 0; c < p.decays; ++c) {
        p.g.buffer.set(p.g.at(0, 1, hv, c), -INFINITY);
        p.g.buffer.set(p.g.at(0, 2, hv, c), -1e4f);
      }
    }
    const Outputs o = p.run(p.params(p.state, 0, s.N));
    for (const CommitMode mode : {CommitMode::kExact, CommitMode::kFast}) {
      Buffer state = p.state;
      const int32_t length = 3;
      CommitParams commit = p.commit_params(state, p.factors(o, s.N), {nullptr, &length, s.N});
      commit.mode = mode;
      ASSERT_EQ(p.call(commit), Status::kOk);
      for (int64_t r = 0; r < s.DV; ++r) {
        for (int64_t c = 0; c < s.DK; ++c) {
          ASSERT_NEAR(state[p.state_at(0) + r * s.DK + c],
                      o.u[(2 * s.HV) * s.DV + r] * o.k[2 * s.HK * s.DK + c], 0x1p-23);
        }
      }
    }
  }
}

}  // namespace
}  // namespace specdec::test
