// verify with strategy solve against the sequential recurrence on trees in float64. Included by the tests of
// a backend, which define before
//   TestProblem          a Problem that calls it
//   kPrecision           what it is called with
//   kValueRows           value rows that it takes
//   solve_shapes()       what it is to follow
//   kNonFinite           what it is given numbers that are not finite in, by kNonFiniteStrategies
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "recurrence_problem.h"

namespace specdec::test {
namespace {

// How far a number may be from the recurrence. TF32x3: an operand's two parts leave 2^-22 of it, so a product
// is off by a standard deviation below 2^-22, four roundings of float32, where a sum over DK >= 32 has more:
// twice the tolerance of float32 covers both. TF32 and bfloat16: operands are off by 2^-11 and 2^-8 of
// themselves, a number is the end of at most four products in a row (Gram matrix, inverse, substitution,
// state), and the errors of n tokens are added up without hope for their signs, as one rounded key is in all
// products of its token.
double tolerance_of(Precision precision, const Truth& t, int64_t DK, int64_t n, double scale) {
  const double wide = t.tolerance(DK, n, scale);
  if (precision == Precision::kIeee) return wide;
  if (precision == Precision::kTf32x3) return 2.0 * wide;
  const double unit = precision == Precision::kTf32 ? 0x1p-11 : 0x1p-8;
  return wide + 4.0 * 2.0 * unit * static_cast<double>(n + 1) * scale;
}

// Half a unit in the last place of x.
double rounding(DType dtype, double x) {
  if (dtype == DType::kFloat32) return 0.0;
  return std::abs(x) * (dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11) +
         (dtype == DType::kFloat16 ? 0x1p-25 : 0.0);
}

class Solve : public TestProblem {
 public:
  Solve(const Shape& s, unsigned seed, Precision precision_ = kPrecision)
      : TestProblem(s, seed), precision(precision_) {
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
    VerifyParams p = this->Problem::params(state, 0, shape.N);
    p.lengths = lengths.data();
    p.parents = tree ? parents.data() : nullptr;
    p.strategy = Strategy::kSolve;
    p.precision = precision;
    return p;
  }

  // Everything that a call wrote, padding included.
  void expect_reference(const VerifyParams& p, const Outputs& o) {
    for (int64_t b = 0; b < shape.B; ++b) expect_row(p, o, b);
  }

  void expect_row(const VerifyParams& p, const Outputs& o, int64_t b) {
    const Shape& s = shape;
    const int64_t n = slots[b] < 0 ? 0 : std::min<int64_t>(std::max(lengths[b], 0), s.N);
    for (int64_t hv = 0; hv < s.HV; ++hv) {
      const Reference root(*this, state, n > 0 ? state_at(b, hv) : 0, b, hv);
      const Truth t(root, 0, n, p.parents != nullptr ? p.parents + b * s.N : nullptr);
      const double q_tolerance = tolerance_of(precision, t, s.DK, n, t.row_norm * t.q_norm);
      const double u_tolerance = tolerance_of(precision, t, s.DK, n, 2.0 * (t.row_norm * t.k_norm + t.v_max));
      const double k_tolerance = t.tolerance(s.DK, 0, t.k_norm);
      for (int64_t i = 0; i < s.N; ++i) {
        SCOPED_TRACE(testing::Message() << "row " << b << " node " << i << " head " << hv);
        const int64_t token = b * s.N + i;
        const int64_t value = (token * s.HV + hv) * s.DV;
        const int64_t key = (token * s.HK + hv / (s.HV / s.HK)) * s.DK;
        const bool valid = i < n;
        for (int64_t r = 0; r < s.DV; ++r) {
          const double out = valid ? t.steps[i].out[r] : 0.0;
          ASSERT_NEAR(o.out[value + r], out,
                      valid ? q_tolerance + rounding(s.dtype, std::abs(out) + q_tolerance) : 0.0);
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

  Precision precision;
  std::vector<int32_t> lengths, parents;
};

TEST(VerifySolve, FollowsReference) {
  unsigned seed = 0;
  for (const Shape& s : solve_shapes()) {
    Solve problem(s, seed);
    const bool tree = seed++ % 4 > 0;
    SCOPED_TRACE(testing::Message() << "gate " << static_cast<int>(s.gate) << " update "
                                    << static_cast<int>(s.update) << " N " << s.N << " DK " << s.DK << " DV "
                                    << s.DV << " tree " << tree);
    const Buffer before = problem.state;
    const VerifyParams p = problem.params(tree);
    problem.expect_reference(p, problem.run(p));
    ASSERT_TRUE(same_bits(problem.state, before));
    if (HasFatalFailure()) return;
  }
}

TEST(VerifySolve, PaddingIsZeroAndUnread) {
  for (const Gate gate : kGates) {
    Shape s;
    s.B = 4, s.N = 20, s.gate = gate, s.DV = kValueRows;
    Solve problem(s, 43);
    problem.slots[1] = -1;
    problem.lengths = {13, 20, 0, 99};
    for (const auto& [b, from] : {std::pair<int64_t, int64_t>{0, 13}, {1, 0}, {2, 0}}) {
      for (Tensor* x : {&problem.q, &problem.k, &problem.v, &problem.beta}) {
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
  s.B = 2, s.N = 0, s.DV = kValueRows;
  Solve problem(s, 44);
  const Buffer before = problem.state;
  problem.run(problem.params());
  EXPECT_TRUE(same_bits(problem.state, before));
}

// A deferred commit leaves the state that an exact commit leaves, to the bit, and answers from it.
TEST(VerifySolve, PendingEqualsCommitFirst) {
  unsigned seed = 50;
  for (const Gate gate : kGates) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      Shape s;
      s.B = 4, s.N = 20, s.DV = kValueRows, s.gate = gate, s.state = dtype;
      Solve round(s, seed++);
      const Outputs drafted = round.run(round.params());
      std::vector<int32_t> path, path_lengths = {0, 18, 1, 3};
      for (int64_t b = 0; b < s.B; ++b) {
        for (int32_t i = 0; i < 18; ++i) path.push_back(i + 2);
      }
      const PathView accepted{path.data(), path_lengths.data(), 18};
      round.lengths = {20, 20, 0, 4};
      Buffer eager = round.state, deferred = round.state;
      ASSERT_EQ(round.call(round.commit_params(eager, round.factors(drafted, s.N), accepted)), Status::kOk);
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

// A node that is not finite reaches its descendants alone, whatever the strategy: all other nodes keep the
// numbers that they have without it.
TEST(VerifySolve, NonFiniteNodesReachOnlyDescendants) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  unsigned seed = 60;
  for (const Gate gate : kGates) {
    for (const Update update : kUpdates) {
      Shape s = kNonFinite;
      s.gate = gate, s.update = update;
      const int64_t head = s.HK - 1;
      Solve problem(s, seed++);
      for (const Strategy strategy : kNonFiniteStrategies) {
        const auto run = [&] {
          VerifyParams p = problem.params();
          p.strategy = strategy;
          if (strategy != Strategy::kSolve) p.precision = Precision::kIeee;
          return problem.run(p);
        };
        const Outputs want = run();
        for (const float bad : {kNaN, kInfinity, -kInfinity}) {
          for (const int64_t node : {0, 5, 20}) {
            std::vector<bool> reached(s.N);
            for (int64_t i = node; i < s.N; ++i) {
              reached[i] = i == node || (problem.parents[i] >= node && reached[problem.parents[i]]);
            }
            const auto entry_of = [&](Tensor& x, int64_t h, int64_t i) {
              return &x.buffer.f32[x.at(0, node, h, i)];
            };
            std::vector<std::pair<const char*, float*>> entries = {
                {"q", entry_of(problem.q, head, 3)},
                {"k", entry_of(problem.k, head, 3)},
                {"v", entry_of(problem.v, head, s.DV - 5)}};
            if (update == Update::kDelta) entries.push_back({"beta", entry_of(problem.beta, head, 0)});
            if (problem.decays > 0 && bad > -kInfinity) {  // a gate of -inf forgets
              entries.push_back({"g", entry_of(problem.g, head, problem.decays - 1)});
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
  s.N = 257, s.DV = kValueRows;
  Solve large(s, 46);
  large.run(large.params(), Status::kUnsupported);
  s.N = 4;
  Solve problem(s, 47);
  VerifyParams p = problem.params();
  p.has_prefix = true;
  problem.run(p, Status::kUnsupported);
}

}  // namespace
}  // namespace specdec::test
