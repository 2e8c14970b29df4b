// verify with strategy solve on the CPU backend.
#include <gtest/gtest.h>

#include "recurrence_problem.h"

namespace specdec::test {
namespace {

using TestProblem = Problem;
constexpr Precision kPrecision = Precision::kIeee;
constexpr int64_t kValueRows = 70;

std::vector<Shape> solve_shapes() {
  std::vector<Shape> all;
  for (const Gate gate : kGates) {
    for (const Update update : kUpdates) {
      for (const int64_t N : {1, 2, 7, 8, 9, 16, 17, 31, 33, 64, 65}) {
        const auto i = static_cast<int64_t>(all.size());
        Shape s;
        s.N = N, s.gate = gate, s.update = update, s.HK = 2, s.HV = 4;
        s.DK = 16 * (1 + i % 5), s.DV = 17 + 29 * (i % 4);
        s.qk_l2norm = i % 3 > 0;
        all.push_back(s);
      }
    }
  }
  for (const Gate gate : kGates) {  // the largest trees
    Shape s;
    s.N = 256, s.gate = gate, s.HV = 1;
    all.push_back(s);
  }
  Shape s;  // a model's
  s.B = 2, s.N = 12, s.HK = 4, s.HV = 4, s.DK = 256, s.DV = 256;
  all.push_back(s);
  return all;
}

// Whatever the strategy: this is the place where serial and hybrid are held to it, too.
constexpr Strategy kNonFiniteStrategies[] = {Strategy::kSerial, Strategy::kHybrid, Strategy::kSolve};
const Shape kNonFinite = [] {
  Shape s;
  s.N = 37, s.HK = 2, s.HV = 4, s.DV = 45;
  return s;
}();

}  // namespace
}  // namespace specdec::test

#include "solve_suite.h"

namespace specdec::test {
namespace {

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

}  // namespace
}  // namespace specdec::test
