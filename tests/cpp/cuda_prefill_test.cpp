// prefill of the CUDA backend, through the executor, or on a GPU in the GPU's build.
#include <gtest/gtest.h>

#include "cuda_problem.h"

namespace specdec::test {
namespace {

using TestProblem = CudaProblem;
constexpr Precision kPrecision = Precision::kTf32x3;
constexpr double kErrors = 2.0;  // of TF32x3: see solve_suite.h
constexpr int64_t kValueRows = 32;

std::vector<Shape> prefill_shapes() {
  constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  std::vector<Shape> all;
  for (const Gate gate : kGates) {
    for (const Update update : kUpdates) {
      for (const int64_t T : {1, 33, 64, 65, 150}) {
        const auto i = static_cast<int64_t>(all.size());
        Shape s;
        s.N = T, s.gate = gate, s.update = update, s.HK = 1, s.HV = 1 + i % 2;
        s.DK = 32 * (1 + i % 3), s.DV = 32;
        s.dtype = kDTypes[i % 3], s.state = i % 4 == 1 ? DType::kBFloat16 : DType::kFloat32;
        s.qk_l2norm = i % 5 > 0;
        all.push_back(s);
      }
    }
  }
  for (const Gate gate : {Gate::kHead, Gate::kChannel}) {  // the longest keys
    Shape s;
    s.N = 40, s.gate = gate, s.DK = 256, s.DV = 64, s.HV = 1;
    all.push_back(s);
  }
  return all;
}

}  // namespace
}  // namespace specdec::test

#include "prefill_suite.h"

#ifdef SPECDEC_SIMT

namespace specdec::test {
namespace {

// The state is read once and written once; accesses to it are coalesced, and no access to shared memory takes
// more than two passes.
TEST(Prefill, Traffic) {
  for (const Gate gate : {Gate::kHead, Gate::kChannel}) {
    Shape s;
    s.N = 130, s.DK = 128, s.DV = 64, s.HV = 1, s.gate = gate;
    Prefill problem(s, 30);
    problem.prefill(problem.params());
    const simt::KernelCounts& counts = problem.last().report.kernel("Prefill");
    const simt::BufferCounts state = buffer(counts, "state");
    EXPECT_EQ(state.bytes_read, s.DV * s.DK * 4);
    EXPECT_EQ(state.bytes_written, s.DV * s.DK * 4);
    expect_coalesced(counts, "solve_state");
    EXPECT_GT(counts.mma_tf32, 0);
  }
}

TEST(Prefill, RefusesWhatItCannotRun) {
  Shape s;
  s.DV = kValueRows;
  Prefill problem(s, 1);
  PrefillParams p = problem.params();
  p.rec.HK = 3;
  problem.prefill(p, Status::kInvalidArgument);
  p = problem.params();
  p.g = nullptr;
  problem.prefill(p, Status::kInvalidArgument);
  p = problem.params();
  p.rec.DK = 48;
  problem.prefill(p, Status::kUnsupported);
  p = problem.params();
  p.precision = Precision::kIeee;
  problem.prefill(p, Status::kUnsupported);
}

}  // namespace
}  // namespace specdec::test

#endif
