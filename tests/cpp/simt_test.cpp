// The SIMT executor: kernels with known answers.
#include <gtest/gtest.h>

#include <vector>

#include "cuda/every_primitive.cuh"
#include "launch.cuh"

namespace specdec::cuda {
namespace {

TEST(Simt, EveryPrimitiveRunsClean) {
  const int blocks = 5;
  std::vector<float> x(blocks * 256), y(blocks * 64), sum(1);
  std::vector<bfloat16> narrow(256);
  std::vector<int32_t> flags(blocks + 1);
  for (size_t i = 0; i < x.size(); ++i) x[i] = 0.01f * static_cast<float>(i % 17) - 0.05f;
  for (size_t i = 0; i < narrow.size(); ++i) narrow[i] = round_to<bfloat16>(0.1f * static_cast<float>(i % 7));
  simt::Session session;
  session.memory.add("x", x.data(), x.size(), simt::Direction::kInput);
  session.memory.add("narrow", narrow.data(), narrow.size(), simt::Direction::kInput);
  session.memory.add("y", y.data(), y.size(), simt::Direction::kOutput);
  session.memory.add("sum", sum.data(), sum.size(), simt::Direction::kBoth);
  session.memory.add("flags", flags.data(), flags.size(), simt::Direction::kBoth);
  const EveryPrimitiveParams p{x.data(), narrow.data(), y.data(), sum.data(), flags.data(), blocks};
  ASSERT_EQ(launch<EveryPrimitive<bfloat16>>(p, &session), Status::kOk);
  EXPECT_TRUE(session.report.clean()) << session.report.to_string();
  EXPECT_EQ(sum[0], 64.0f * blocks);
  EXPECT_EQ(flags[blocks], blocks);
  EXPECT_EQ(session.memory.at("y").bytes_with_values(), static_cast<int64_t>(y.size() * sizeof(float)));
}

}  // namespace
}  // namespace specdec::cuda
