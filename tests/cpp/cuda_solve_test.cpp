// verify_solve of the CUDA backend, through the executor, or on a GPU in the GPU's build.
#include <gtest/gtest.h>

#include "cuda_problem.h"

namespace specdec::test {
namespace {

using TestProblem = CudaProblem;
constexpr Precision kPrecision = Precision::kTf32x3;
constexpr int64_t kValueRows = 32;

std::vector<Shape> solve_shapes() {
  constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  std::vector<Shape> all;
  for (const Gate gate : kGates) {
    for (const Update update : kUpdates) {
      for (const int64_t N : {1, 7, 16, 17, 32, 45}) {
        const auto i = static_cast<int64_t>(all.size());
        Shape s;
        s.N = N, s.gate = gate, s.update = update, s.HK = 1 + i % 2, s.HV = 2;
        s.DK = 32 * (1 + i % 3), s.DV = 32 * (1 + i / 2 % 2);
        s.dtype = kDTypes[i % 3], s.state = i % 4 == 1 ? DType::kBFloat16 : DType::kFloat32;
        s.qk_l2norm = i % 5 > 0;
        all.push_back(s);
      }
    }
  }
  for (const Gate gate : {Gate::kHead, Gate::kChannel}) {
    // The largest tree, long keys.
    for (const auto& [N, DK] : {std::pair{256, 32}, {9, 256}, {20, 192}, {34, 256}}) {
      Shape s;
      s.N = N, s.gate = gate, s.HV = 1, s.DK = DK, s.DV = 32;
      all.push_back(s);
    }
  }
  return all;
}

constexpr Strategy kNonFiniteStrategies[] = {Strategy::kSolve};
const Shape kNonFinite = [] {
  Shape s;
  s.N = 37, s.HV = 1, s.DV = 32;
  return s;
}();

}  // namespace
}  // namespace specdec::test

#include "solve_suite.h"

namespace specdec::test {
namespace {

TEST(VerifySolve, LowerPrecisions) {
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

// A draft that says one token again and again: equal keys at full strength, where the powers of the
// coefficients reach binomials and the finite product would cancel.
TEST(VerifySolve, EqualKeys) {
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

// A row has the same bits alone, where every tile has its block, and in a batch so large that a block has all
// tiles of a key head.
TEST(VerifySolve, RowsDoNotMeet) {
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

#ifdef SPECDEC_SIMT
// The state is read once and, with pending factors, written once; all bytes together are near the least
// possible; accesses to the state are coalesced, and no access to shared memory takes more than two passes.
TEST(VerifySolve, Traffic) {
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
        const simt::BufferCounts moved = buffer(counts, "state");
        EXPECT_EQ(moved.bytes_read, state);
        EXPECT_EQ(moved.bytes_written, pending ? state : 0);
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

TEST(VerifySolve, RefusesWhatNoInstanceTakes) {
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
