// verify_solve of the CUDA backend against the sequential recurrence on trees in float64, through the
// executor, or on a GPU in the GPU's build.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>

#include "../../csrc/simt/numbers.h"
#include "cuda_problem.h"

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

class Solve : public CudaProblem {
 public:
  Solve(const Shape& s, unsigned seed, Precision precision_ = Precision::kTf32x3)
      : CudaProblem(s, seed), precision(precision_) {
    for (int64_t b = 0; b < s.B; ++b) {
      lengths.push_back(static_cast<int32_t>(s.N));
      for (int64_t n = 0; n < s.N; ++n) {
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

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

TEST(CudaSolve, FollowsReference) {
  unsigned seed = 0;
  for (const Gate gate : kGates) {
    for (const Update update : kUpdates) {
      for (const int64_t N : {1, 7, 16, 17, 32, 45}) {
        Shape s;
        s.N = N, s.gate = gate, s.update = update, s.HK = 1 + seed % 2, s.HV = 2;
        s.DK = 32 * (1 + seed % 3), s.DV = 32 * (1 + seed / 2 % 2);
        s.dtype = kDTypes[seed % 3], s.state = seed % 4 == 1 ? DType::kBFloat16 : DType::kFloat32;
        s.qk_l2norm = seed % 5 > 0;
        Solve problem(s, seed);
        const bool tree = seed++ % 4 > 0;
        SCOPED_TRACE(testing::Message()
                     << "gate " << static_cast<int>(gate) << " update " << static_cast<int>(update) << " N "
                     << N << " DK " << s.DK << " DV " << s.DV << " tree " << tree);
        const VerifyParams p = problem.params(tree);
        problem.expect_reference(p, problem.run(p));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(CudaSolve, LowerPrecisions) {
  for (const Precision precision : {Precision::kTf32, Precision::kBf16}) {
    for (const Gate gate : kGates) {
      for (const int64_t N : {12, 30}) {
        Shape s;
        s.N = N, s.gate = gate, s.DK = 64, s.DV = 32;
        Solve problem(s, static_cast<unsigned>(N), precision);
        const VerifyParams p = problem.params();
        problem.expect_reference(p, problem.run(p));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(CudaSolve, LargestTree) {
  for (const Gate gate : {Gate::kHead, Gate::kChannel}) {
    Shape s;
    s.N = 256, s.gate = gate, s.HV = 1, s.DV = 32;
    Solve problem(s, 40);
    const VerifyParams p = problem.params();
    problem.expect_reference(p, problem.run(p));
  }
}

TEST(CudaSolve, WideHeads) {
  for (const int64_t N : {9, 20, 34}) {
    for (const Gate gate : {Gate::kHead, Gate::kChannel}) {
      Shape s;
      s.N = N, s.gate = gate, s.HV = 1, s.DK = N == 20 ? 192 : 256, s.DV = 32;
      Solve problem(s, 41);
      const VerifyParams p = problem.params();
      problem.expect_reference(p, problem.run(p));
    }
  }
}

// A draft that says one token again and again: equal keys at full strength, where the powers of the
// coefficients reach binomials and the finite product would cancel.
TEST(CudaSolve, EqualKeys) {
  for (const float strength : {1.0f, 1.9f}) {
    Shape s;
    s.N = 64, s.gate = Gate::kNone, s.HV = 1, s.DV = 32;
    Solve problem(s, 42);
    for (int64_t n = 0; n < s.N; ++n) {
      for (int64_t c = 0; c < s.DK; ++c)
        problem.k.buffer.set(problem.k.at(0, n, 0, c), static_cast<float>(c % 5) - 1.5f);
      problem.beta.buffer.set(problem.beta.at(0, n, 0), strength);
    }
    const VerifyParams p = problem.params(false);
    problem.expect_reference(p, problem.run(p));
  }
}

TEST(CudaSolve, PaddingIsZeroAndUnread) {
  for (const Gate gate : kGates) {
    Shape s;
    s.B = 4, s.N = 20, s.gate = gate, s.DV = 32;
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

TEST(CudaSolve, NoNodes) {
  Shape s;
  s.B = 2, s.N = 0, s.DV = 32;
  Solve problem(s, 44);
  problem.run(problem.params());
}

// Pending factors are folded in with the operations of the step, in their order, rounded once to the state's
// type, and the answers are those of the state that is left.
TEST(CudaSolve, PendingIsFoldedExactly) {
  unsigned seed = 50;
  for (const Gate gate : kGates) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      Shape s;
      s.B = 4, s.N = 20, s.DV = 32, s.gate = gate, s.state = dtype;
      Solve round(s, seed++);
      const Outputs drafted = round.run(round.params());
      std::vector<int32_t> path, path_lengths = {0, 18, 1, 3};
      for (int64_t b = 0; b < s.B; ++b) {
        for (int32_t i = 0; i < 18; ++i) path.push_back(i + 2);
      }
      round.lengths = {20, 20, 0, 4};
      Buffer eager = round.state;
#ifdef SPECDEC_SIMT
      // In float32, factor by factor.
      for (int64_t b = 0; b < s.B; ++b) {
        for (int64_t hv = 0; hv < s.HV; ++hv) {
          for (int64_t i = 0; i < s.DV * s.DK; ++i) {
            const int64_t at = round.state_at(b, hv) + i, c = i % s.DK;
            float x = widen(eager.data(), dtype, at);
            for (int32_t j = 0; j < path_lengths[b]; ++j) {
              const int64_t node = b * s.N + path[b * 18 + j], d = round.decays;
              if (d > 0) x = std::exp(drafted.g.f32[(node * s.HV + hv) * d + (d > 1 ? c : 0)]) * x;
              x = std::fma(drafted.u.f32[(node * s.HV + hv) * s.DV + i / s.DK],
                           drafted.k.f32[(node * s.HK + hv / (s.HV / s.HK)) * s.DK + c], x);
            }
            if (dtype == DType::kFloat32) {
              eager.f32[at] = x;
            } else {
              eager.half[at] = simt::to_bfloat16(x).bits;
            }
          }
        }
      }
#else
      // A GPU's exp has another last bit than the host's.
      const PathView view{path.data(), path_lengths.data(), 18};
      EXPECT_EQ(round.call(round.commit_params(eager, round.factors(drafted, s.N), view)), Status::kOk);
#endif
      VerifyParams p = round.params();
      p.state.data = eager.data();
      const Outputs want = round.run(p);
      Buffer deferred = round.state;
      p.state.data = deferred.data();
      p.has_pending = true;
      p.pending = round.factors(drafted, s.N);
      p.pending_path = {path.data(), path_lengths.data(), 18};
      const Outputs got = round.run(p);
      EXPECT_TRUE(same_bits(deferred, eager));
      EXPECT_TRUE(same_bits(got.out, want.out));
      EXPECT_TRUE(same_bits(got.u, want.u));
    }
  }
}

// A row has the same bits alone, where every tile has its block, and in a batch so large that a block has all
// tiles of a key head.
TEST(CudaSolve, RowsDoNotMeet) {
  for (const Gate gate : {Gate::kHead, Gate::kChannel}) {
    Shape s;
    s.B = 270, s.N = 6, s.DV = 64, s.HV = 3, s.gate = gate;
    Solve batch(s, 60);
    // Most rows are padding, for the time's sake.
    for (int64_t b = 0; b < s.B; ++b) batch.lengths[b] = b % 90 == 7 ? static_cast<int32_t>(6 - b / 90) : 0;
    const VerifyParams all = batch.params();
    const Outputs want = batch.run(all);
    const int64_t row = s.N * s.HV * s.DV;
    for (const int64_t b : {7, 97, 187}) {
      batch.expect_row(all, want, b);
      VerifyParams alone = all;
      batch.only_row(alone, b);
      alone.lengths = &batch.lengths[b];
      alone.parents = &batch.parents[b * s.N];
      const Outputs o = batch.run(alone);
      EXPECT_EQ(std::memcmp(o.out.data(), &want.out.f32[b * row], row * sizeof(float)), 0) << "row " << b;
      EXPECT_EQ(std::memcmp(o.u.data(), &want.u.f32[b * row], row * sizeof(float)), 0) << "row " << b;
    }
  }
}

// A node that is not finite reaches its descendants alone: all other nodes keep their bits.
TEST(CudaSolve, NonFiniteNodesReachOnlyDescendants) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  unsigned seed = 70;
  for (const Gate gate : kGates) {
    for (const Update update : kUpdates) {
      Shape s;
      s.N = 37, s.HV = 1, s.DV = 32, s.gate = gate, s.update = update;
      Solve problem(s, seed++);
      const VerifyParams p = problem.params();
      const Outputs want = problem.run(p);
      for (const int64_t node : {0, 5, 20}) {
        std::vector<bool> reached(s.N);
        for (int64_t i = node; i < s.N; ++i) {
          reached[i] = i == node || (problem.parents[i] >= node && reached[problem.parents[i]]);
        }
        const auto entry_of = [&](Tensor& x, int64_t i) { return &x.buffer.f32[x.at(0, node, 0, i)]; };
        std::vector<std::pair<const char*, float*>> entries = {
            {"q", entry_of(problem.q, 3)}, {"k", entry_of(problem.k, 3)}, {"v", entry_of(problem.v, 20)}};
        if (update == Update::kDelta) entries.push_back({"beta", entry_of(problem.beta, 0)});
        if (problem.decays > 0) entries.push_back({"g", entry_of(problem.g, problem.decays - 1)});
        for (const auto& [name, entry] : entries) {
          const float bad = seed % 2 == 0 || node == 5 ? kNaN : kInfinity;
          SCOPED_TRACE(testing::Message() << name << " is " << bad << " in node " << node);
          const float good = *entry;
          *entry = bad;
          const Outputs o = problem.run(p);
          *entry = good;
          bool seen = false;  // in the node's own answer
          for (int64_t i = 0; i < s.N; ++i) {
            for (int64_t at = i * s.DV; at < (i + 1) * s.DV; ++at) {
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

#ifdef SPECDEC_SIMT
// The state is read once and, with pending factors, written once; all bytes together are near the least
// possible; accesses to the state are coalesced, and no access to shared memory takes more than two passes.
TEST(CudaSolve, Traffic) {
  for (const bool pending : {false, true}) {
    for (const int64_t N : {8, 32}) {
      for (const Gate gate : {Gate::kHead, Gate::kChannel}) {
        if (N == 32 && pending != (gate == Gate::kHead)) continue;  // for the time's sake
        Shape s;
        s.B = 264, s.N = N, s.DK = 128, s.DV = 128, s.HV = 2, s.gate = gate;
        Solve problem(s, 80);
        // Two sequences; the others are padding, there to give a block all tiles of its head.
        std::fill(problem.slots.begin() + 2, problem.slots.end(), -1);
        VerifyParams p = problem.params();
        Outputs factors{Buffer(DType::kFloat32, 0), Buffer(DType::kFloat32, s.B * 4 * s.DK),
                        Buffer(DType::kFloat32, s.B * 4 * s.HV * s.DV),
                        Buffer(DType::kFloat32, s.B * 4 * s.HV * problem.decays)};
        for (Buffer* x : {&factors.k, &factors.u, &factors.g}) std::fill(x->f32.begin(), x->f32.end(), -0.1f);
        p.has_pending = pending;
        p.pending = problem.factors(factors, 4);
        p.pending_path = {nullptr, nullptr, 4};
        problem.run(p);
        const simt::KernelCounts& counts = problem.last().report.kernel("VerifySolve");
        const int64_t state = 2 * s.HV * s.DV * s.DK * 4;
        int64_t least = pending ? 2 * state : state;
        for (const simt::BufferCounts& buffer : counts.buffers) {
          if (buffer.name == "state") {
            EXPECT_EQ(buffer.bytes_read, state);
            EXPECT_EQ(buffer.bytes_written, pending ? state : 0);
          }
        }
        const int64_t keys = s.DK, values = s.HV * s.DV, gates = s.HV * problem.decays;
        least += 4 * (2 * N * (2 * keys + values + gates + s.HV) + s.B * N * (keys + 2 * values + gates));
        if (pending) least += 4 * 2 * 4 * (keys + values + gates);
        EXPECT_LE(static_cast<double>(counts.read.bytes + counts.write.bytes),
                  1.15 * static_cast<double>(least));
        expect_coalesced(counts, "solve_state");
        EXPECT_GT(counts.mma_tf32, 0);
      }
    }
  }
}

TEST(CudaSolve, RefusesWhatItCannotRun) {
  simt::Session session;
  Shape s;
  s.DV = 32;
  Solve problem(s, 90);
  const VerifyParams good = problem.params();
  const auto expect = [&](const VerifyParams& p, Status status) {
    EXPECT_EQ(cuda::verify(p, {}, &session), status);
  };
  VerifyParams p = good;
  p.precision = Precision::kIeee;
  expect(p, Status::kUnsupported);
  p = good, p.has_prefix = true;
  expect(p, Status::kUnsupported);
  p = good, p.N = 257;
  expect(p, Status::kUnsupported);
  p = good, p.rec.DK = 48;
  expect(p, Status::kUnsupported);
  p = good, p.rec.DV = 40;
  expect(p, Status::kUnsupported);
  p = good, p.state.slot_stride += 1;
  expect(p, Status::kUnsupported);
  p = good, p.rec.HK = 3;
  expect(p, Status::kInvalidArgument);
  p = good, p.beta = nullptr;
  expect(p, Status::kInvalidArgument);
  EXPECT_TRUE(session.report.kernels.empty());
}
#endif

}  // namespace
}  // namespace specdec::test
