// tree_attention of the CPU backend.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "attention_problem.h"
#include "ops.h"

namespace specdec::attention_test {
namespace {

Status call(const TreeAttentionParams& p) { return cpu::tree_attention(p); }
void run(const TreeAttentionParams& p) { ASSERT_EQ(cpu::tree_attention(p), Status::kOk); }

constexpr int64_t kBoundaries[] = {0, 1, 15, 63, 240, 255, 256, 257, 511};

std::vector<Case> cases() {
  std::vector<Case> all;
  constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  for (const int64_t D : {16, 32, 48, 64, 80, 128, 256}) {
    for (const auto& [HQ, HK] : {std::pair<int64_t, int64_t>{1, 1}, {9, 3}, {6, 1}, {40, 1}}) {
      const auto i = static_cast<int64_t>(all.size());
      Case c;
      c.B = 1 + i % 3, c.N = 1 + i * 5 % 23, c.HQ = HQ, c.HK = HK, c.D = D, c.dtype = kTypes[i % 3];
      c.prefix = i % 4 == 3 ? 6 : 0, c.committed = i * 37 % 600, c.tree = i % 5 > 0;
      all.push_back(c);
    }
  }
  return all;
}

}  // namespace
}  // namespace specdec::attention_test

#include "attention_suite.h"
