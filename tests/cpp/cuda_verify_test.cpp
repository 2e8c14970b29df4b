// Exact verification and commits of the CUDA backend, executed without a GPU, or on one in the GPU's build.
#include <gtest/gtest.h>

#include "cuda_problem.h"
#ifdef SPECDEC_SIMT
#include "reservation.h"
#endif

namespace specdec::test {
using TestProblem = CudaProblem;
}

#include "verify_suite.h"

namespace specdec::test {
namespace {

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const Gate gate : kGates) {
    for (const Update update : kUpdates) {
      Shape s;
      s.gate = gate;
      s.update = update;
      s.B = 2, s.N = 6, s.HK = 1, s.HV = 2, s.DK = 32, s.DV = 32;
      s.dtype = update == Update::kDelta ? DType::kBFloat16 : DType::kFloat16;
      s.qk_l2norm = update == Update::kDelta;
      s.gap = update == Update::kDelta ? 8 : 5;  // rows of 16 bytes, and others
      all.push_back(s);
    }
  }
  Shape s;  // several tiles, more tokens than one bank holds
  s.B = 2, s.N = 11, s.HK = 1, s.HV = 1, s.DK = 64, s.DV = 64;
  all.push_back(s);
  return all;
}
INSTANTIATE_TEST_SUITE_P(Recurrences, VerifyTest, testing::ValuesIn(shapes()), name_of);

// Every key dimension, state and kind of gate has instances of its own.
TEST(InstanceTest, EveryOneMatchesFloat64) {
  for (const int64_t DK : {32, 64, 96, 128, 192, 256}) {
    for (const DType state : {DType::kFloat32, DType::kBFloat16}) {
      for (const Gate gate : {Gate::kHead, Gate::kChannel}) {
        SCOPED_TRACE(testing::Message() << "DK " << DK << ", state " << static_cast<int>(state) << ", gate "
                                        << static_cast<int>(gate));
        Shape s;
        s.gate = gate;
        s.state = state;
        s.N = 5, s.HK = s.HV = 1, s.DK = DK, s.DV = 32, s.gap = 8;
        CudaProblem p(s, 41);
        const auto parents = random_parents(p, s.N, 0, 3);
        VerifyParams params = p.params(p.state, 0, s.N);
        params.parents = parents.data();
        const Outputs o = p.run(params);
        expect_float64(p, o, parents);
        params.strategy = Strategy::kHybrid;
        expect_same(o, p.run(params));
      }
    }
  }
}

// Trees of the largest size, up to five states kept at a time: too many for the usual tile where keys are
// long.
TEST(InstanceTest, LargestTrees) {
  for (const int64_t DK : {32, 256}) {
    Shape s;
    s.N = kMaxSerialNodes, s.HK = s.HV = 1, s.DK = DK, s.DV = 32;
    CudaProblem p(s, 43);
    std::vector<int32_t> binary;  // a forest of two: every node has two children
    for (int32_t n = 0; n < s.N; ++n) binary.push_back(n < 2 ? -1 : n / 2 - 1);
    for (const auto& parents : {binary, random_parents(p, s.N, 0, 9), random_parents(p, s.N, 0, 1)}) {
      VerifyParams params = p.params(p.state, 0, s.N);
      params.parents = parents.data();
      const Outputs o = p.run(params);
      expect_float64(p, o, parents);
      params.strategy = Strategy::kHybrid;
      expect_same(o, p.run(params));
    }
  }
}

#ifdef SPECDEC_SIMT
// A slot beyond 2^31 elements of the pool.
TEST(InstanceTest, SlotsAreAddressedInSixtyFourBits) {
  Shape s;
  s.HK = s.HV = 1, s.DV = 32;
  CudaProblem near(s, 47);
  const Outputs expected = near.run(near.params(near.state, 0, s.N));
  CudaProblem p(s, 47);
  const float* state = p.state.f32.data() + p.state_at(0);
  p.pool = 2;
  p.slot_stride = (int64_t{1} << 31) + 16;
  p.slots = {1};
  const simt::Reservation far(p.pool * p.slot_stride * sizeof(float));
  std::copy_n(state, s.DV * s.DK, static_cast<float*>(far.data()) + p.slot_stride);
  VerifyParams params = p.params(p.state, 0, s.N);
  params.state.data = far.data();
  expect_same(p.run(params), expected);
}
#endif

// More rows than a grid has in its second and third dimension.
TEST(InstanceTest, ManyRows) {
  Shape s;
  s.N = 1, s.HK = s.HV = 1, s.DV = 32;
  CudaProblem p(s, 53);
  const Outputs expected = p.run(p.params(p.state, 0, 1));
  VerifyParams params = p.params(p.state, 0, 1);
  params.B = 65537;
  for (Strides* stride :
       {&params.q_stride, &params.k_stride, &params.v_stride, &params.g_stride, &params.beta_stride}) {
    stride->b = 0;
  }
  std::vector<int32_t> slots(params.B, -1);
  slots.back() = p.slots[0];
  params.slots = slots.data();
  const Outputs o = p.run(params);
  for (int64_t i = 0; i < s.DV; ++i) {
    EXPECT_EQ(o.out[(params.B - 1) * s.DV + i], expected.out[i]);
    EXPECT_EQ(o.out[(params.B - 2) * s.DV + i], 0.0);
  }
}

#ifdef SPECDEC_SIMT
TEST(LimitsTest, UnsupportedShapesAreRefusedUntouched) {
  Shape s;
  s.N = 65, s.DV = 32;
  CudaProblem p(s, 37);
  p.run(p.params(p.state, 0, 65), Status::kUnsupported);
  VerifyParams narrow = p.params(p.state, 0, 4);
  narrow.rec.DK = 48;
  p.run(narrow, Status::kUnsupported);
  VerifyParams crooked = p.params(p.state, 0, 4);
  crooked.state.slot_stride += 1;  // rows that no 16-byte access reaches
  p.run(crooked, Status::kUnsupported);
  VerifyParams ungated = p.params(p.state, 0, 4);
  ungated.g = nullptr;
  p.run(ungated, Status::kInvalidArgument);
}
#endif

}  // namespace
}  // namespace specdec::test
