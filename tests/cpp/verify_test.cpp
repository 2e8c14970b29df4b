// The CPU's exact verification and commits. CTest runs this file once per instruction set (SPECDEC_CPU_ISA).
#include <gtest/gtest.h>

#include "recurrence_problem.h"

namespace specdec::test {
using TestProblem = Problem;
}

#include "verify_suite.h"

namespace specdec::test {
namespace {

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const Gate gate : {Gate::kNone, Gate::kHead, Gate::kChannel}) {
    for (const Update update : {Update::kAdditive, Update::kDelta}) {
      Shape s;
      s.gate = gate;
      s.update = update;
      all.push_back(s);
      s.B = 3, s.N = 13, s.HK = 2, s.HV = 6, s.DK = 48, s.DV = 67;  // rows that fill no block, grouped heads
      s.dtype = DType::kBFloat16;
      all.push_back(s);
      s.B = 2, s.N = 24, s.HK = 2, s.HV = 2, s.DK = 256, s.DV = 96;  // several tiles
      s.dtype = DType::kFloat16;
      s.qk_l2norm = false;
      all.push_back(s);
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Recurrences, VerifyTest, testing::ValuesIn(shapes()), name_of);

TEST(LimitsTest, UnsupportedShapesAreRefusedUntouched) {
  Shape s;
  s.N = 65;
  Problem p(s, 37);
  p.run(p.params(p.state, 0, 65), Status::kUnsupported);
  VerifyParams narrow = p.params(p.state, 0, 4);
  narrow.rec.DK = 20;
  p.run(narrow, Status::kUnsupported);
  VerifyParams ungated = p.params(p.state, 0, 4);
  ungated.g = nullptr;
  p.run(ungated, Status::kInvalidArgument);
}

}  // namespace
}  // namespace specdec::test
