// verify with strategy solve against the sequential recurrence on trees in float64.
#include <gtest/gtest.h>

#include <cstring>

#include "recurrence_problem.h"

namespace specdec::test {
namespace {

class Solve : public Problem {
 public:
  Solve(const Shape& s, unsigned seed) : Problem(s, seed) {
    for (int64_t b = 0; b < s.B; ++b) {
      lengths.push_back(static_cast<int32_t>(s.N));
      for (int64_t n = 0; n < s.N; ++n) {
        // Mostly deep, with branches anywhere and several roots.
        const bool deep = below(3) > 0;
        parents.push_back(static_cast<int32_t>(deep ? n - 1 : below(n + 1) - 1));
      }
    }
  }

  VerifyParams params(bool tree = true) {
    VerifyParams p = Problem::params(state, 0, shape.N);
    p.lengths = lengths.data();
    p.parents = tree ? parents.data() : nullptr;
    p.strategy = Strategy::kSolve;
    return p;
  }

  // Everything that a call wrote, padding included.
  void expect_reference(const VerifyParams& p, const Outputs& o) {
    const Shape& s = shape;
    for (int64_t b = 0; b < s.B; ++b) {
      const int64_t n = slots[b] < 0 ? 0 : std::min<int64_t>(std::max(lengths[b], 0), s.N);
      for (int64_t hv = 0; hv < s.HV; ++hv) {
        const Reference root(*this, state, n > 0 ? state_at(b, hv) : 0, b, hv);
        const Truth t(root, 0, n, p.parents != nullptr ? p.parents + b * s.N : nullptr);
        const double q_tolerance = t.tolerance(s.DK, n, t.row_norm * t.q_norm);
        const double u_tolerance = t.tolerance(s.DK, n, 2.0 * (t.row_norm * t.k_norm + t.v_max));
        const double k_tolerance = t.tolerance(s.DK, 0, t.k_norm);
        for (int64_t i = 0; i < s.N; ++i) {
          SCOPED_TRACE(testing::Message() << "row " << b << " node " << i << " head " << hv);
          const int64_t token = b * s.N + i;
          const int64_t value = (token * s.HV + hv) * s.DV;
          const int64_t key = (token * s.HK + hv / (s.HV / s.HK)) * s.DK;
          const bool valid = i < n;
          for (int64_t r = 0; r < s.DV; ++r) {
            ASSERT_NEAR(o.out[value + r], valid ? t.steps[i].out[r] : 0.0, valid ? q_tolerance : 0.0);
            ASSERT_NEAR(o.u[value + r], valid ? t.steps[i].u[r] : 0.0, valid ? u_tolerance : 0.0);
          }
          for (int64_t c = 0; c < s.DK; ++c) {
            ASSERT_NEAR(o.k[key + c], valid ? t.steps[i].k[c] : 0.0, valid ? k_tolerance : 0.0);
          }
          for (int64_t c = 0; c < decays; ++c) {
            ASSERT_EQ(o.g[(token * s.HV + hv) * decays + c], valid ? g.buffer[g.at(b, i, hv, c)] : 0.0);
          }
        }
      }
    }
  }

  std::vector<int32_t> lengths, parents;
};

TEST(VerifySolve, FollowsReference) {
  unsigned seed = 0;
  for (const Gate gate : kGates) {
    for (const Update update : kUpdates) {
      for (const int64_t N : {1, 2, 7, 8, 9, 16, 17, 31, 33, 64, 65}) {
        Shape s;
        s.N = N, s.gate = gate, s.update = update, s.HK = 2, s.HV = 4;
        s.DK = 16 * (1 + seed % 5), s.DV = 17 + 29 * (seed % 4);
        s.qk_l2norm = seed % 3 > 0;
        Solve problem(s, seed);
        const bool tree = seed++ % 4 > 0;
        SCOPED_TRACE(testing::Message()
                     << "gate " << static_cast<int>(gate) << " update " << static_cast<int>(update) << " N "
                     << N << " DK " << s.DK << " DV " << s.DV << " tree " << tree);
        const Buffer before = problem.state;
        const VerifyParams p = problem.params(tree);
        problem.expect_reference(p, problem.run(p));
        ASSERT_TRUE(same_bits(problem.state, before));
      }
    }
  }
}

TEST(VerifySolve, LargestTree) {
  for (const Gate gate : kGates) {
    Shape s;
    s.N = 256, s.gate = gate, s.HV = 1;
    Solve problem(s, 40);
    const VerifyParams p = problem.params();
    problem.expect_reference(p, problem.run(p));
  }
}

TEST(VerifySolve, ModelShape) {
  Shape s;
  s.B = 2, s.N = 12, s.HK = 4, s.HV = 4, s.DK = 256, s.DV = 256;
  Solve problem(s, 41);
  const VerifyParams p = problem.params();
  problem.expect_reference(p, problem.run(p));
}

TEST(VerifySolve, PaddingIsZeroAndUnread) {
  for (const Gate gate : kGates) {
    Shape s;
    s.B = 4, s.N = 20, s.gate = gate;
    Solve problem(s, 42);
    problem.slots[1] = -1;
    problem.lengths = {13, 20, 0, 99};
    for (const auto& [b, from] : {std::pair<int64_t, int64_t>{0, 13}, {1, 0}, {2, 0}}) {
      for (Tensor* x : {&problem.q, &problem.k, &problem.beta}) {
        std::fill(&x->buffer.f32[x->at(b, from, 0)], &x->buffer.f32[x->at(b, s.N, 0)], kNaN);
      }
      std::fill(problem.parents.begin() + b * s.N + from, problem.parents.begin() + (b + 1) * s.N, 1 << 30);
    }
    const VerifyParams p = problem.params();
    problem.expect_reference(p, problem.run(p));
  }
}

TEST(VerifySolve, NoNodes) {
  Shape s;
  s.B = 2, s.N = 0;
  Solve problem(s, 43);
  const Buffer before = problem.state;
  problem.run(problem.params());
  EXPECT_TRUE(same_bits(problem.state, before));
}

// A deferred commit leaves the state that an exact commit leaves, to the bit, and answers from it.
TEST(VerifySolve, PendingEqualsCommitFirst) {
  for (const Gate gate : kGates) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      Shape s;
      s.B = 4, s.N = 10, s.DV = 70, s.gate = gate, s.state = dtype;
      Solve round(s, 44);
      const Outputs drafted = round.run(round.params());
      std::vector<int32_t> path, path_lengths = {0, 3, 1, 2};
      for (int64_t b = 0; b < s.B; ++b) path.insert(path.end(), {0, 2, 5});
      round.lengths = {10, 10, 0, 4};
      const PathView accepted{path.data(), path_lengths.data(), 3};

      Buffer eager = round.state, deferred = round.state;
      ASSERT_EQ(cpu::commit(round.commit_params(eager, round.factors(drafted, s.N), accepted)), Status::kOk);
      VerifyParams p = round.params();
      p.state.data = eager.data();
      const Outputs want = round.run(p);
      p.state.data = deferred.data();
      p.has_pending = true;
      p.pending = round.factors(drafted, s.N);
      p.pending_path = accepted;
      const Outputs got = round.run(p);
      EXPECT_TRUE(same_bits(deferred, eager));
      EXPECT_TRUE(same_bits(got.out, want.out));
      EXPECT_TRUE(same_bits(got.u, want.u));
    }
  }
}

// A row has the same bits alone and in a batch.
TEST(VerifySolve, RowsDoNotMeet) {
  Shape s;
  s.B = 3, s.N = 21, s.DV = 80, s.HK = 2;
  Solve batch(s, 45);
  batch.lengths = {21, 4, 11};
  const Outputs want = batch.run(batch.params());
  const int64_t row = s.N * s.HV * s.DV;
  for (int64_t b = 0; b < s.B; ++b) {
    VerifyParams alone = batch.params();
    batch.only_row(alone, b);
    alone.lengths = &batch.lengths[b];
    alone.parents = &batch.parents[b * s.N];
    const Outputs o = batch.run(alone);
    EXPECT_EQ(std::memcmp(o.out.data(), &want.out.f32[b * row], row * sizeof(float)), 0) << "row " << b;
  }
}

// A node that is not finite reaches its descendants alone, whatever the strategy: all other nodes keep the
// numbers that they have without it.
TEST(Verify, NonFiniteNodesReachOnlyDescendants) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  unsigned seed = 60;
  for (const Gate gate : kGates) {
    for (const Update update : kUpdates) {
      Shape s;
      s.N = 37, s.HK = 2, s.HV = 4, s.DV = 45, s.gate = gate, s.update = update;
      Solve problem(s, seed++);
      for (const Strategy strategy : {Strategy::kSerial, Strategy::kHybrid, Strategy::kSolve}) {
        const auto run = [&] {
          VerifyParams p = problem.params();
          p.strategy = strategy;
          return problem.run(p);
        };
        const Outputs want = run();
        for (const float bad : {kNaN, kInfinity, -kInfinity}) {
          for (const int64_t node : {0, 5, 20}) {
            std::vector<bool> reached(s.N);
            for (int64_t i = node; i < s.N; ++i) {
              reached[i] = i == node || (problem.parents[i] >= node && reached[problem.parents[i]]);
            }
            const auto entry_of = [&](Tensor& x, int64_t head, int64_t i) {
              return &x.buffer.f32[x.at(0, node, head, i)];
            };
            std::vector<std::pair<const char*, float*>> entries = {{"q", entry_of(problem.q, 1, 3)},
                                                                   {"k", entry_of(problem.k, 1, 3)},
                                                                   {"v", entry_of(problem.v, 1, 40)}};
            if (update == Update::kDelta) entries.push_back({"beta", entry_of(problem.beta, 1, 0)});
            if (problem.decays > 0 && bad > -kInfinity) {  // a gate of -inf forgets
              entries.push_back({"g", entry_of(problem.g, 1, problem.decays - 1)});
            }
            for (const auto& [name, entry] : entries) {
              SCOPED_TRACE(testing::Message() << name << " is " << bad << " in node " << node << ", strategy "
                                              << static_cast<int>(strategy));
              const float good = *entry;
              *entry = bad;
              const Outputs o = run();
              *entry = good;
              bool seen = false;  // in the node's own answer
              for (int64_t i = 0; i < s.N; ++i) {
                for (int64_t at = i * s.HV * s.DV; at < (i + 1) * s.HV * s.DV; ++at) {
                  if (i == node) seen |= !std::isfinite(o.out[at]);
                  if (reached[i]) continue;
                  ASSERT_EQ(o.out[at], want.out[at]) << "node " << i;
                  ASSERT_EQ(o.u[at], want.u[at]) << "node " << i;
                }
              }
              EXPECT_TRUE(seen);
            }
          }
        }
      }
    }
  }
}

TEST(VerifySolve, RefusesWhatItCannotRun) {
  Shape s;
  s.N = 257;
  Solve large(s, 46);
  large.run(large.params(), Status::kUnsupported);
  Solve problem(Shape{}, 47);
  VerifyParams p = problem.params();
  p.has_prefix = true;
  problem.run(p, Status::kUnsupported);
}

}  // namespace
}  // namespace specdec::test
