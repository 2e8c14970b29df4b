// prefill of the CPU backend.
#include <gtest/gtest.h>

#include "recurrence_problem.h"

namespace specdec::test {
namespace {

using TestProblem = Problem;
constexpr Precision kPrecision = Precision::kIeee;
constexpr double kErrors = 1.0;
constexpr int64_t kValueRows = 45;

std::vector<Shape> prefill_shapes() {
  std::vector<Shape> all;
  for (const Gate gate : kGates) {
    for (const Update update : kUpdates) {
      for (const int64_t T : {1, 7, 32, 33, 63, 64, 65, 200}) {
        const auto i = static_cast<int64_t>(all.size());
        Shape s;
        s.N = T, s.gate = gate, s.update = update;
        s.DK = 16 * (1 + i % 5), s.DV = 17 + 13 * (i % 4);
        s.qk_l2norm = i % 3 > 0;
        s.HV = 1 + i % 2;
        all.push_back(s);
      }
    }
  }
  for (const Gate gate : {Gate::kHead, Gate::kChannel}) {  // long ones
    Shape s;
    s.N = 1000, s.DK = 64, s.gate = gate, s.HV = 1;
    all.push_back(s);
  }
  Shape s;  // a model's
  s.B = 2, s.N = 70, s.HK = 2, s.HV = 4, s.DK = 128, s.DV = 256;
  all.push_back(s);
  return all;
}

}  // namespace
}  // namespace specdec::test

#include "prefill_suite.h"

namespace specdec::test {
namespace {

TEST(Prefill, RefusesWhatItCannotRun) {
  Prefill problem(Shape{}, 1);
  PrefillParams p = problem.params();
  p.rec.HK = 3;
  problem.prefill(p, Status::kInvalidArgument);
  p = problem.params();
  p.g = nullptr;
  problem.prefill(p, Status::kInvalidArgument);
  p = problem.params();
  p.rec.DK = 24;
  problem.prefill(p, Status::kUnsupported);
  p = problem.params();
  p.state.dtype = DType::kFloat16;
  problem.prefill(p, Status::kUnsupported);
}

}  // namespace
}  // namespace specdec::test
