// verify with strategy solve against the sequential recurrence on trees in float64.
#include <gtest/gtest.h>

#include <cstring>

#include "ops.h"
#include "recurrence_problem.h"

namespace specdec {
namespace {

class Solve : public Problem {
 public:
  Solve(const Shape& shape, unsigned seed) : Problem(shape, seed) {
    for (int64_t b = 0; b < s.B; ++b) {
      lengths.push_back(static_cast<int32_t>(s.N));
      for (int64_t n = 0; n < s.N; ++n) {
        // Mostly deep, with branches anywhere and several roots.
        const bool deep = rng() % 3 > 0;
        const int32_t last = static_cast<int32_t>(n) - 1;
        parents.push_back(deep ? last : std::uniform_int_distribution<int32_t>(-1, last)(rng));
      }
    }
  }

  VerifyParams params(bool tree = true) {
    VerifyParams p;
    fill_common(p);
    p.N = s.N;
    p.lengths = lengths.data();
    p.parents = tree ? parents.data() : nullptr;
    k_out.assign(s.B * s.N * s.HK * s.DK, kNaN);
    u_out.assign(s.B * s.N * s.HV * s.DV, kNaN);
    g_out.assign(s.B * s.N * s.HV * decays, kNaN);
    p.k_out = k_out.data();
    p.u_out = u_out.data();
    p.g_out = decays > 0 ? g_out.data() : nullptr;
    p.strategy = Strategy::kSolve;
    return p;
  }

  // Everything that a call wrote, padding included.
  void expect_reference(const VerifyParams& p) {
    for (int64_t b = 0; b < s.B; ++b) {
      const int64_t n = slots[b] < 0 ? 0 : std::min<int64_t>(std::max(lengths[b], 0), s.N);
      for (int64_t hv = 0; hv < s.HV; ++hv) {
        Truth t;
        if (n > 0)
          t = truth(b, 0, n, hv, p.parents != nullptr ? p.parents + b * s.N : nullptr, state_of(b, hv));
        const double q_tolerance = t.tolerance(s.DK, n, t.row_norm * t.q_norm);
        const double u_tolerance = t.tolerance(s.DK, n, 2.0 * (t.row_norm * t.k_norm + t.v_max));
        const double k_tolerance = t.tolerance(s.DK, 0, t.k_norm);
        for (int64_t i = 0; i < s.N; ++i) {
          const int64_t token = b * s.N + i;
          for (int64_t r = 0; r < s.DV; ++r) {
            const int64_t at = (token * s.HV + hv) * s.DV + r;
            ASSERT_LE(std::abs(out[at] - (i < n ? t.out[i * s.DV + r] : 0.0)), i < n ? q_tolerance : 0.0)
                << "row " << b << " node " << i << " head " << hv << " value row " << r;
            ASSERT_LE(std::abs(u_out[at] - (i < n ? t.u[i * s.DV + r] : 0.0)), i < n ? u_tolerance : 0.0)
                << "row " << b << " node " << i << " head " << hv << " value row " << r;
          }
          const int64_t hk = hv / (s.HV / s.HK);
          for (int64_t c = 0; c < s.DK; ++c) {
            ASSERT_LE(std::abs(k_out[(token * s.HK + hk) * s.DK + c] - (i < n ? t.k[i * s.DK + c] : 0.0)),
                      i < n ? k_tolerance : 0.0);
          }
          for (int64_t c = 0; c < decays; ++c) {
            const float want = i < n ? g[b * gate_stride.b + i * gate_stride.n + hv * decays + c] : 0.0f;
            ASSERT_EQ(g_out[(token * s.HV + hv) * decays + c], want);
          }
        }
      }
    }
  }

  std::vector<int32_t> lengths, parents;
  std::vector<float> k_out, u_out, g_out;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(VerifySolve, FollowsReference) {
  unsigned seed = 0;
  for (const Gate gate : kGates) {
    for (const Update update : kUpdates) {
      for (const int64_t N : {1, 2, 7, 8, 9, 16, 17, 31, 33, 64, 65}) {
        Shape s;
        s.N = N, s.gate = gate, s.update = update, s.HK = 2, s.HV = 4;
        s.DK = 16 * (1 + seed % 5), s.DV = 17 + 29 * (seed % 4);
        s.l2norm = seed % 3 > 0;
        Solve problem(s, seed);
        const bool tree = seed++ % 4 > 0;
        SCOPED_TRACE(testing::Message()
                     << "gate " << static_cast<int>(gate) << " update " << static_cast<int>(update) << " N "
                     << N << " DK " << s.DK << " DV " << s.DV << " tree " << tree);
        const std::vector<float> before = problem.state;
        const VerifyParams p = problem.params(tree);
        ASSERT_EQ(cpu::verify(p), Status::kOk);
        problem.expect_reference(p);
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
    ASSERT_EQ(cpu::verify(p), Status::kOk);
    problem.expect_reference(p);
  }
}

TEST(VerifySolve, ModelShape) {
  Shape s;
  s.B = 2, s.N = 12, s.HK = 4, s.HV = 4, s.DK = 256, s.DV = 256;
  Solve problem(s, 41);
  const VerifyParams p = problem.params();
  ASSERT_EQ(cpu::verify(p), Status::kOk);
  problem.expect_reference(p);
}

TEST(VerifySolve, PaddingIsZeroAndUnread) {
  for (const Gate gate : kGates) {
    Shape s;
    s.B = 4, s.N = 20, s.gate = gate;
    Solve problem(s, 42);
    problem.slots[1] = -1;
    problem.lengths = {13, 20, 0, 99};
    for (const auto& [b, from] : {std::pair<int64_t, int64_t>{0, 13}, {1, 0}, {2, 0}}) {
      for (auto* keys : {&problem.q, &problem.k}) {
        std::fill(keys->begin() + b * problem.key_stride.b + from * problem.key_stride.n,
                  keys->begin() + (b + 1) * problem.key_stride.b, kNaN);
      }
      std::fill(problem.beta.begin() + (b * s.N + from) * s.HV, problem.beta.begin() + (b + 1) * s.N * s.HV,
                kNaN);
      std::fill(problem.parents.begin() + b * s.N + from, problem.parents.begin() + (b + 1) * s.N, 1 << 30);
    }
    const VerifyParams p = problem.params();
    ASSERT_EQ(cpu::verify(p), Status::kOk);
    problem.expect_reference(p);
  }
}

TEST(VerifySolve, NoNodes) {
  Shape s;
  s.B = 2, s.N = 0;
  Solve problem(s, 43);
  const std::vector<float> before = problem.state;
  VerifyParams p = problem.params();
  p.g = p.beta = before.data();  // an empty vector may have no address; null would mean no gate
  ASSERT_EQ(cpu::verify(p), Status::kOk);
  EXPECT_TRUE(same_bits(problem.state, before));
}

// A deferred commit leaves the state that an exact commit leaves, to the bit, and answers from it.
TEST(VerifySolve, PendingEqualsCommitFirst) {
  for (const Gate gate : kGates) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      Shape s;
      s.B = 4, s.N = 10, s.DV = 70, s.gate = gate;
      Solve round(s, 44);
      ASSERT_EQ(cpu::verify(round.params()), Status::kOk);
      const std::vector<float> k = round.k_out, u = round.u_out, g = round.g_out;
      std::vector<int32_t> path, path_lengths = {0, 3, 1, 2};
      for (int64_t b = 0; b < s.B; ++b) path.insert(path.end(), {0, 2, 5});
      round.lengths = {10, 10, 0, 4};

      // A bfloat16 pool is the upper half of a float32 one.
      std::vector<uint16_t> narrow;
      for (const float e : round.state) {
        uint32_t bits;
        std::memcpy(&bits, &e, 4);
        narrow.push_back(static_cast<uint16_t>(bits >> 16));
      }
      const auto run = [&](bool deferred, std::vector<float> wide_pool, std::vector<uint16_t> narrow_pool) {
        VerifyParams p = round.params();
        p.state.data = dtype == DType::kFloat32 ? static_cast<void*>(wide_pool.data()) : narrow_pool.data();
        p.state.dtype = dtype;
        const FactorsView factors{k.data(), u.data(), p.g != nullptr ? g.data() : nullptr, s.N};
        const PathView accepted{path.data(), path_lengths.data(), 3};
        if (deferred) {
          p.has_pending = true;
          p.pending = factors;
          p.pending_path = accepted;
        } else {
          CommitParams commit;
          commit.rec = p.rec;
          commit.B = p.B;
          commit.factors = factors;
          commit.path = accepted;
          commit.state = p.state;
          commit.slots = p.slots;
          EXPECT_EQ(cpu::commit(commit), Status::kOk);
        }
        EXPECT_EQ(cpu::verify(p), Status::kOk);
        return std::pair(wide_pool, narrow_pool);
      };
      const auto want = run(false, round.state, narrow);
      const std::vector<float> want_out = round.out, want_u = round.u_out;
      const auto got = run(true, round.state, narrow);
      EXPECT_TRUE(same_bits(got.first, want.first));
      EXPECT_EQ(got.second, want.second);
      EXPECT_TRUE(same_bits(round.out, want_out));
      EXPECT_TRUE(same_bits(round.u_out, want_u));
    }
  }
}

// A row has the same bits alone and in a batch.
TEST(VerifySolve, RowsDoNotMeet) {
  Shape s;
  s.B = 3, s.N = 21, s.DV = 80, s.HK = 2;
  Solve batch(s, 45);
  batch.lengths = {21, 4, 11};
  ASSERT_EQ(cpu::verify(batch.params()), Status::kOk);
  const std::vector<float> want = batch.out;
  const int64_t row = s.N * s.HV * s.DV;
  for (int64_t b = 0; b < s.B; ++b) {
    VerifyParams alone = batch.params();
    alone.B = 1;
    alone.q = batch.q.data() + b * batch.key_stride.b;
    alone.k = batch.k.data() + b * batch.key_stride.b;
    alone.v = batch.v.data() + b * batch.value_stride.b;
    alone.g = batch.g.data() + b * batch.gate_stride.b;
    alone.beta = batch.beta.data() + b * batch.beta_stride.b;
    alone.slots = &batch.slots[b];
    alone.lengths = &batch.lengths[b];
    alone.parents = &batch.parents[b * s.N];
    ASSERT_EQ(cpu::verify(alone), Status::kOk);
    EXPECT_EQ(std::memcmp(batch.out.data(), &want[b * row], row * sizeof(float)), 0) << "row " << b;
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
          EXPECT_EQ(cpu::verify(p), Status::kOk);
          return std::pair(problem.out, problem.u_out);
        };
        const auto [out, u] = run();
        for (const float bad : {kNaN, kInfinity, -kInfinity}) {
          for (const int64_t node : {0, 5, 20}) {
            std::vector<bool> reached(s.N);
            for (int64_t i = node; i < s.N; ++i) {
              reached[i] = i == node || (problem.parents[i] >= node && reached[problem.parents[i]]);
            }
            const int64_t key = node * problem.key_stride.n + s.DK + 3, value = node * problem.value_stride.n;
            std::vector<std::pair<const char*, float*>> entries = {{"q", &problem.q[key]},
                                                                   {"k", &problem.k[key]},
                                                                   {"v", &problem.v[value + s.DV + 40]},
                                                                   {"beta", &problem.beta[node * s.HV + 1]}};
            if (problem.decays > 0 && bad > -kInfinity) {  // a gate of -inf forgets
              entries.push_back({"g", &problem.g[node * problem.gate_stride.n + problem.decays]});
            }
            for (const auto& [name, entry] : entries) {
              SCOPED_TRACE(testing::Message() << name << " is " << bad << " in node " << node << ", strategy "
                                              << static_cast<int>(strategy));
              const float good = *entry;
              *entry = bad;
              const auto [bad_out, bad_u] = run();
              *entry = good;
              bool seen = false;  // in the node's own answer
              for (int64_t i = 0; i < s.N; ++i) {
                for (int64_t at = i * s.HV * s.DV; at < (i + 1) * s.HV * s.DV; ++at) {
                  if (i == node) seen |= !std::isfinite(bad_out[at]);
                  if (reached[i]) continue;
                  ASSERT_EQ(bad_out[at], out[at]) << "node " << i;
                  ASSERT_EQ(bad_u[at], u[at]) << "node " << i;
                }
              }
              EXPECT_TRUE(seen || (update == Update::kAdditive && *name == 'b'));
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
  EXPECT_EQ(cpu::verify(large.params()), Status::kUnsupported);
  Solve problem(Shape{}, 47);
  VerifyParams p = problem.params();
  p.has_prefix = true;
  EXPECT_EQ(cpu::verify(p), Status::kUnsupported);
}

}  // namespace
}  // namespace specdec
