// Exact verification and commits of the CUDA backend, executed without a GPU.
#include <gtest/gtest.h>

#include "cuda_problem.h"

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

}  // namespace
}  // namespace specdec::test
