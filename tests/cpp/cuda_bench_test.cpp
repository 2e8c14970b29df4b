// The CUDA benchmarks (bench/cpp/cuda) through the executor, without their timing: that no row is refused,
// that its answers pass its own comparison, and that its kernels are clean. Rows of one sequence and few
// tokens.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "../../bench/cpp/cuda/layers.h"
#include "../../bench/cpp/cuda/measure.h"
#include "buffer.h"
#include "session.h"

namespace specdec::bench {

namespace {

std::unique_ptr<simt::Session> session;
std::vector<std::pair<std::string, std::function<Result()>>> rows;

void expect_clean() {
  if (session == nullptr) return;
  EXPECT_TRUE(session->report.clean()) << session->report.to_string();
}

}  // namespace

// measure.h for the executor.

int64_t rotation(double) { return 2; }

// A session for the next call, that knows the memory of now.
cudaStream_t stream() {
  expect_clean();
  session = std::make_unique<simt::Session>();
  for (const auto& [data, bytes] : test::device_memory()) {
    session->memory.add("device", data, bytes, simt::Direction::kBoth);
  }
  return session.get();
}

Time replay(const Call& call, int64_t sets, int) {
  // One of them: what there is beyond the first set.
  if (call(sets - 1, stream()) != Status::kOk) return {-1.0, "refused"};
  return {1.0, ""};
}

void fill(gpu::DeviceMemory& memory, DType dtype, double scale, double shift, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  const size_t size = dtype == DType::kFloat32 ? 4 : 2;
  for (size_t at = 0; at + size <= memory.bytes(); at += size) {
    const auto x = static_cast<float>(scale) * uniform(random) + static_cast<float>(shift);
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    if (size == 2) bits >>= 16;
    std::memcpy(static_cast<char*>(memory.data()) + at, &bits, size);
  }
}

void add(const std::string& name, std::function<Result()> body) { rows.emplace_back(name, std::move(body)); }

namespace {

// Runs the rows whose whole name matches.
void run(const char* names) {
  if (rows.empty())
    add_verify(), add_commit(), add_convolution(), add_layer(), add_prefill(), add_acceptance();
  int64_t count = 0;
  for (const auto& [name, body] : rows) {
    if (!std::regex_match(name, std::regex(names))) continue;
    SCOPED_TRACE(name);
    ++count;
    const Result result = body();
    EXPECT_GE(result.failure().us, 0.0) << result.failure().error;
    expect_clean();
  }
  EXPECT_GT(count, 0) << names;
}

TEST(CudaBench, Serial) { run("verify/serial/.*/(32x128_f32|64x128_bf16)/B:1/N:4/pending:4"); }
TEST(CudaBench, Hybrid) { run("verify/hybrid/.*/32x128_f32/B:1/N:4/.*"); }
TEST(CudaBench, Solve) { run("verify/solve/.*/32x128_f32/B:1/N:4/pending:4"); }
TEST(CudaBench, LowerPrecision) { run("verify/solve_.*/B:1/N:16/.*"); }
TEST(CudaBench, WideHeads) { run("verify/.*/tree/8x256_f32/B:1/N:8/pending:8"); }
TEST(CudaBench, Commit) { run("commit/.*/B:1(/P:4)?"); }
TEST(CudaBench, Round) { run("round/.*/B:1/.*"); }
TEST(CudaBench, Convolution) { run("conv_verify/.*/B:1/N:8/.*"); }
TEST(CudaBench, Layer) { run("layer/.*/B:1"); }
TEST(CudaBench, Prefill) { run("prefill/8x256_f32/B:1/T:64"); }
TEST(CudaBench, Acceptance) { run("accept_.*/B:1/N:8|sampling_probs/R:1"); }

}  // namespace
}  // namespace specdec::bench
