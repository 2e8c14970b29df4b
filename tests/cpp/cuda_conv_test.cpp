// conv_verify and conv_commit of the CUDA backend, executed on the host, or on a GPU in the GPU's build.
#include <gtest/gtest.h>

#include <cstring>
#include <utility>
#include <vector>

#include "../../csrc/cuda/ops.h"
#include "conv_problem.h"
#ifdef SPECDEC_SIMT
#include "counts.h"
#include "session.h"
#else
#include "gpu/mirror.h"
#endif

namespace specdec::conv_test {
namespace {

#ifdef SPECDEC_SIMT

using simt::Direction;

int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Rows of x that a call may read hold values, the gaps between them and rows beyond `length` do not.
void add_inputs(simt::Memory& memory, const char* name, const ConvInputView& x, int64_t B, int64_t C,
                const std::vector<int64_t>& lengths) {
  const int64_t size = size_of(x.dtype);
  if (B * x.nodes == 0) return;
  simt::Buffer& buffer = memory.add(name, x.x, B * x.stride_b * size, Direction::kInput);
  buffer.clear_values(buffer.begin(), B * x.stride_b * size);
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t n = 0; n < std::min(lengths[b], x.nodes); ++n) {
      buffer.set_values(buffer.begin() + (b * x.stride_b + n * x.stride_n) * size, C * size);
    }
  }
}

void add_state(simt::Memory& memory, const ConvStateView& state, const int32_t* slots, int64_t B,
               int64_t window) {
  const int64_t size = size_of(state.dtype);
  if (window == 0) return;
  simt::Buffer& buffer =
      memory.add("state", state.data, state.slots * state.slot_stride * size, Direction::kBoth);
  if (state.slots * state.slot_stride > int64_t{1} << 31) return;  // too much to mark: all of it may be read
  buffer.clear_values(buffer.begin(), state.slots * state.slot_stride * size);
  for (int64_t b = 0; b < B; ++b) {
    const int64_t slot = slots != nullptr ? slots[b] : b;
    if (slot >= 0) buffer.set_values(buffer.begin() + slot * state.slot_stride * size, window * size);
  }
}

template <typename Path>
void add_path(simt::Memory& memory, const Path& path, int64_t B) {
  memory.add("path", path.path, B * path.max_length, Direction::kInput);
  memory.add("path_lengths", path.lengths, B, Direction::kInput);
}

void add_memory(simt::Memory& memory, const ConvVerifyParams& p) {
  std::vector<int64_t> lengths, whole(p.B, int64_t{1} << 40);
  for (int64_t b = 0; b < p.B; ++b) {
    const bool padding = p.slots != nullptr && p.slots[b] < 0;
    lengths.push_back(padding ? 0 : p.lengths != nullptr ? p.lengths[b] : p.N);
  }
  add_inputs(memory, "x", p.x, p.B, p.C, lengths);
  if (p.has_prefix) add_inputs(memory, "prefix", p.prefix, p.B, p.C, whole);
  if (p.has_pending) add_inputs(memory, "pending", p.pending, p.B, p.C, whole);
  if (p.has_pending) add_path(memory, p.pending_path, p.B);
  add_state(memory, p.state, p.slots, p.B, (p.W - 1) * p.C);
  memory.add("weight", p.weight, p.C * p.W, Direction::kInput);
  memory.add("bias", p.bias, p.C, Direction::kInput);
  memory.add("slots", p.slots, p.B, Direction::kInput);
  memory.add("parents", p.parents, p.B * p.N, Direction::kInput);
  memory.add("lengths", p.lengths, p.B, Direction::kInput);
  if (p.has_prefix) memory.add("prefix_parents", p.prefix_parents, p.B * p.prefix.nodes, Direction::kInput);
  if (p.B * p.N > 0) memory.add("y", p.y, p.B * p.N * p.C * size_of(p.x.dtype), Direction::kOutput);
}

// Runs p and expects a clean report and every element of y written.
simt::Report run(const ConvVerifyParams& p) {
  static uint64_t calls = 0;  // an order of blocks each
  simt::Session session({++calls});
  add_memory(session.memory, p);
  EXPECT_EQ(cuda::conv_verify(p, &session), Status::kOk);
  EXPECT_TRUE(session.report.clean()) << session.report.to_string();
  if (p.B * p.N > 0) {
    EXPECT_EQ(session.memory.at("y").bytes_with_values(), p.B * p.N * p.C * size_of(p.x.dtype));
  }
  return session.report;
}

simt::Report run(const ConvCommitParams& p) {
  simt::Session session({2});
  add_inputs(session.memory, "x", p.x, p.B, p.C, std::vector<int64_t>(p.B, p.x.nodes));
  add_path(session.memory, p.path, p.B);
  add_state(session.memory, p.state, p.slots, p.B, (p.W - 1) * p.C);
  session.memory.add("slots", p.slots, p.B, Direction::kInput);
  EXPECT_EQ(cuda::conv_commit(p, &session), Status::kOk);
  EXPECT_TRUE(session.report.clean()) << session.report.to_string();
  return session.report;
}

// A call that is refused starts nothing.
Status call(const ConvVerifyParams& p) {
  simt::Session session;
  const Status status = cuda::conv_verify(p, &session);
  EXPECT_TRUE(session.report.kernels.empty());
  return status;
}

#else

// What is refused is not looked at.
Status call(const ConvVerifyParams& p) { return cuda::conv_verify(p, nullptr); }

template <typename Params>
void run(const Params& p) {
  EXPECT_EQ(gpu::call(p), Status::kOk);
}

#endif

// The types a call may have: float32 throughout, or 16 bits with a window in either.
constexpr std::pair<DType, DType> kTypes[] = {{DType::kFloat32, DType::kFloat32},
                                              {DType::kBFloat16, DType::kBFloat16},
                                              {DType::kBFloat16, DType::kFloat32},
                                              {DType::kFloat16, DType::kFloat16},
                                              {DType::kFloat16, DType::kFloat32}};

constexpr int64_t kLongChain = 300;

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& [dtype, state] : kTypes) {
    for (const int64_t W : {1, 2, 4, 5, 16}) {
      for (const int64_t C : {1, 40, 77, 136}) {
        for (const bool tree : {false, true}) {
          const auto i = static_cast<int64_t>(all.size());
          Case c;
          c.B = 1 + i % 3, c.N = 1 + i % 9, c.C = C, c.W = W, c.tree = tree;
          c.bias = i % 2 > 0, c.silu = i % 3 > 0, c.prefix = i % 4 == 3 ? 5 : 0;
          c.dtype = dtype, c.state = state;
          c.gap = C % 8 == 0 ? 8 : 5;  // 16-byte accesses, or element by element
          all.push_back(c);
        }
      }
    }
  }
  return all;
}

}  // namespace
}  // namespace specdec::conv_test

#include "conv_suite.h"

namespace specdec::conv_test {
namespace {

// Many sequences: a block takes several of them.
TEST(ConvVerify, ManySequences) {
  Case c;
  c.B = 2051, c.N = 2, c.C = 8, c.gap = 8;
  Problem problem(c, 5);
  for (int64_t b = 0; b < c.B; ++b) {
    problem.lengths[b] = static_cast<int32_t>(b % 3);
    if (b % 7 == 5) problem.slots[b] = -1;
  }
  run(problem.params());
  problem.expect_reference();
}

#ifdef SPECDEC_SIMT
// The window is read once, written once where something is pending; every input once; whole sectors.
TEST(ConvVerify, TrafficIsTheLeast) {
  for (const auto& [dtype, state] : kTypes) {
    for (const bool pending : {false, true}) {
      for (const int64_t N : {8, 32}) {
        Case c;
        c.B = 4, c.N = N, c.C = 256, c.tree = true, c.gap = 64, c.dtype = dtype, c.state = state;
        Problem problem(c, 9);
        Round round(problem, 7, {2, 3, 6, 1});
        ConvVerifyParams p = problem.params();
        p.has_pending = pending;
        p.pending = round.input;
        p.pending_path = round.view();
        const simt::Report report = run(p);
        const simt::KernelCounts& counts = report.kernel("ConvVerify");
        const int64_t row = c.C * size_of(dtype), window_row = c.C * size_of(state);
        int64_t least = (c.W + 1) * c.C * 4;
        const auto expect = [&](const char* name, int64_t reads, int64_t writes) {
          SCOPED_TRACE(name);
          const simt::BufferCounts moved = test::buffer(counts, name);
          EXPECT_EQ(moved.bytes_read, reads);
          EXPECT_EQ(moved.bytes_written, writes);
          least += reads + writes;
        };
        expect("x", c.B * N * row, 0);
        expect("y", 0, c.B * N * row);
        if (pending) expect("pending", (2 + 3 + 3 + 1) * row, 0);
        expect("state", (pending ? 1 + 0 + 0 + 2 : 12) * window_row, pending ? 12 * window_row : 0);
        // So few channels and sequences leave every block with one sequence: weights are read once a
        // sequence.
        const int64_t weights_again = (c.B - 1) * (c.W + 1) * c.C * 4;
        EXPECT_LE(counts.read.bytes + counts.write.bytes - weights_again, 1.15 * static_cast<double>(least));
        EXPECT_LE(counts.write.sectors_per_request(), 4.0);
        EXPECT_LE(counts.shared.worst, 2);
        for (const simt::LineCounts& line : counts.lines) {
          // The window and the staged inputs; weights of two channels a lane span twice the sectors.
          if (line.file.find("conv_window") != std::string::npos || line.write.requests > 0) {
            EXPECT_LE(line.read.sectors_per_request(), 4.0) << line.file << ":" << line.line;
          }
        }
      }
    }
  }
}

TEST(ConvCommit, TrafficIsTheLeast) {
  Case c;
  c.B = 3, c.C = 512, c.W = 4, c.gap = 64;
  Problem problem(c, 9);
  Round round(problem, 7, {2, 0, 5});
  ConvCommitParams p;
  p.B = c.B, p.C = c.C, p.W = c.W;
  p.x = round.input, p.path = round.view();
  p.state = problem.params().state;
  p.slots = problem.slots.data();
  const simt::Report report = run(p);
  const simt::KernelCounts& counts = report.kernel("ConvCommit");
  const simt::BufferCounts state = test::buffer(counts, "state");
  EXPECT_EQ(state.bytes_read, c.C * 4);         // one row survives the path of two
  EXPECT_EQ(state.bytes_written, 6 * c.C * 4);  // an empty path touches nothing
  EXPECT_EQ(test::buffer(counts, "x").bytes_read, (2 + 3) * c.C * 4);
  EXPECT_LE(counts.read.sectors_per_request(), 4.0);
  EXPECT_LE(counts.write.sectors_per_request(), 4.0);
}

// A slot beyond 2^31 elements.
TEST(ConvVerify, OffsetsAre64Bit) {
  Case c;
  c.C = 40, c.gap = 8;
  Problem problem(c, 4);
  ConvVerifyParams p = problem.params();
  const int64_t slots = 5, stride = int64_t{1} << 30;
  const simt::Reservation pool(slots * stride * 4);
  float* window = static_cast<float*>(pool.data()) + (slots - 1) * stride;
  std::copy_n(&problem.state[problem.slots[0] * problem.slot_stride], (c.W - 1) * c.C, window);
  const int32_t slot = slots - 1;
  p.state = {pool.data(), DType::kFloat32, slots, stride};
  p.slots = &slot;
  run(p);
  problem.expect_reference();

  Round round(problem, 4, {2});
  p.has_pending = true;
  p.pending = round.input, p.pending_path = round.view();
  const std::vector<float> want = moved(problem, round);
  run(p);
  EXPECT_EQ(std::memcmp(window, &want[problem.slots[0] * problem.slot_stride], (c.W - 1) * c.C * 4), 0);
}

TEST(ConvVerify, RefusesLargeTrees) {
  Problem problem(Case{}, 1);
  ConvVerifyParams p = problem.params();
  p.parents = problem.parents.data();
  p.N = 513;
  EXPECT_EQ(call(p), Status::kUnsupported);
}
#endif

}  // namespace
}  // namespace specdec::conv_test
