// What exact verification and commits move, counted by the executor.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "../../csrc/cuda/instances.cuh"
#include "../../csrc/cuda/verify_serial.cuh"
#include "cuda_problem.h"

namespace specdec::test {
namespace {

using cuda::kTall;

struct Traffic {
  int64_t read = 0, written = 0;  // of the state
  int64_t total = 0;              // of everything
};

// The one kernel that ran: the state path in full lines, no bank conflicts above two-way.
Traffic counted(const simt::Session& session) {
  EXPECT_TRUE(session.report.clean()) << session.report.to_string();
  EXPECT_EQ(session.report.kernels.size(), 1u);
  const simt::KernelCounts& kernel = session.report.kernels.front();
  expect_coalesced(kernel, "state_tile.cuh");
  Traffic t;
  t.total = kernel.read.bytes + kernel.write.bytes;
  const simt::BufferCounts state = buffer(kernel, "state");
  t.read = state.bytes_read;
  t.written = state.bytes_written;
  return t;
}

int64_t state_bytes(const Shape& s) {
  return s.B * s.HV * s.DV * s.DK * (s.state == DType::kFloat32 ? 4 : 2);
}

// A tree of three roots with branches below.
std::vector<int32_t> bushy(const Shape& s) {
  std::vector<int32_t> parents;
  for (int64_t b = 0; b < s.B; ++b) {
    for (int32_t n = 0; n < s.N; ++n) parents.push_back(n < 3 ? -1 : (n - 3) / 2);
  }
  return parents;
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const auto& [DK, DV] : {std::pair{32, 64}, {96, 32}, {128, 128}, {256, 32}}) {
    for (const DType state : {DType::kFloat32, DType::kBFloat16}) {
      Shape s;
      s.B = 1, s.N = 9, s.HK = 1, s.HV = 1, s.DK = DK, s.DV = DV;
      s.gate = state == DType::kFloat32 ? Gate::kHead : Gate::kChannel;
      s.state = state;
      s.gap = 8;
      all.push_back(s);
    }
  }
  return all;
}

class TrafficTest : public testing::TestWithParam<Shape> {
 protected:
  TrafficTest() : problem(GetParam(), 3), parents(bushy(GetParam())) {}

  // Runs and counts a verification of [first, first + count) of the tokens.
  Traffic verify(VerifyParams p, Outputs* outputs = nullptr) {
    const Outputs o = problem.run(p);
    if (outputs != nullptr) *outputs = o;
    return counted(problem.last());
  }

  CudaProblem problem;
  std::vector<int32_t> parents;
};
INSTANTIATE_TEST_SUITE_P(Shapes, TrafficTest, testing::ValuesIn(shapes()));

TEST_P(TrafficTest, VerifyReadsTheStateOnceAndWritesNone) {
  VerifyParams p = problem.params(problem.state, 0, GetParam().N);
  for (const int32_t* tree :
       {static_cast<const int32_t*>(nullptr), static_cast<const int32_t*>(parents.data())}) {
    p.parents = tree;
    const Traffic t = verify(p);
    EXPECT_EQ(t.read, state_bytes(GetParam()));
    EXPECT_EQ(t.written, 0);
  }
}

TEST_P(TrafficTest, PendingIsOneReadAndOneWrite) {
  const Shape& s = GetParam();
  Outputs drafted;
  verify(problem.params(problem.state, 0, 5), &drafted);
  VerifyParams p = problem.params(problem.state, 5, s.N - 5);
  const std::vector<int32_t> lengths(s.B, 3);
  p.has_pending = true;
  p.pending = problem.factors(drafted, 5);
  p.pending_path = {nullptr, lengths.data(), 5};
  const Traffic t = verify(p);
  EXPECT_EQ(t.read, state_bytes(s));
  EXPECT_EQ(t.written, state_bytes(s));
}

TEST_P(TrafficTest, CommitIsOneReadAndOneWrite) {
  const Shape& s = GetParam();
  const Outputs drafted = problem.run(problem.params(problem.state, 0, s.N));
  const std::vector<int32_t> lengths(s.B, 4);
  for (const CommitMode mode : {CommitMode::kExact, CommitMode::kFast}) {
    CommitParams p =
        problem.commit_params(problem.state, problem.factors(drafted, s.N), {nullptr, lengths.data(), s.N});
    p.mode = mode;
    ASSERT_EQ(problem.call(p), Status::kOk);
    const Traffic t = counted(problem.last());
    EXPECT_EQ(t.read, state_bytes(s));
    EXPECT_EQ(t.written, state_bytes(s));
  }
}

// A boundary state goes to memory once and comes back once for every chain that starts from it; the state
// itself is read once for every root.
TEST_P(TrafficTest, HybridMovesBoundaryStatesAlone) {
  const Shape& s = GetParam();
  VerifyParams p = problem.params(problem.state, 0, s.N);
  p.parents = parents.data();
  p.strategy = Strategy::kHybrid;
  const Traffic t = verify(p);
  EXPECT_EQ(t.read, 3 * state_bytes(s));
  EXPECT_EQ(t.written, 0);
  int64_t branches = 0, light = 0;  // the children of nodes with several, all but one of them
  for (int32_t n = 0; n < s.N; ++n) {
    const int64_t children = std::count(parents.begin(), parents.begin() + s.N, n);
    branches += children > 1;
    light += children > 1 ? children - 1 : 0;
  }
  const int64_t bytes = s.B * s.HV * s.DV * s.DK * 4;
  const simt::BufferCounts states = buffer(problem.last().report.kernels.front(), "states");
  EXPECT_EQ(states.bytes_written, branches * bytes);
  EXPECT_EQ(states.bytes_read, light * bytes);
}

// Everything that has to move, once: state, inputs, outputs, factors.
int64_t least_bytes(const Shape& s) {
  const int64_t size = s.dtype == DType::kFloat32 ? 4 : 2, rows = s.B * s.N;
  return state_bytes(s) + rows * (2 * s.HK * s.DK + 2 * s.HV * s.DV) * size +
         rows * (s.HK * s.DK + s.HV * s.DV + 3 * s.HV) * 4;
}

// The tall tile that large batches get, at the sizes of real models.
TEST(TallTileTest, WithinFifteenPercentOfTheLeast) {
  for (const auto& [N, DV] : {std::pair{8, 128}, {32, 128}, {16, 256}}) {
    Shape s;
    s.B = 1, s.N = N, s.HK = 1, s.HV = 1, s.DK = DV, s.DV = DV;
    s.dtype = DType::kBFloat16;
    s.gap = 8;
    CudaProblem p(s, 5);
    const Outputs usual = p.run(p.params(p.state, 0, N));
    const bool wide = DV == 256;
    const auto launch_tall = [wide](const VerifyParams& params, simt::Session* session) {
      return wide ? cuda::launch<cuda::VerifySerial<cuda::Tile<false, float, 256, kTall>>>(params, session)
                  : cuda::launch<cuda::VerifySerial<cuda::Tile<false, float, 128, kTall>>>(params, session);
    };
    p.launcher = launch_tall;
    const Outputs tall = p.run(p.params(p.state, 0, N));
    const Traffic t = counted(p.last());
    RecordProperty("bytes_over_least_" + std::to_string(N) + "_" + std::to_string(DV),
                   std::to_string(static_cast<double>(t.total) / static_cast<double>(least_bytes(s))));
    EXPECT_LE(static_cast<double>(t.total), 1.15 * static_cast<double>(least_bytes(s))) << N << ", " << DV;
    EXPECT_TRUE(same_bits(usual.out, tall.out) && same_bits(usual.u, tall.u)) << "the tile changed the bits";
  }
}

}  // namespace
}  // namespace specdec::test
