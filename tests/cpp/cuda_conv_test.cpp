// conv_verify and conv_commit of the CUDA backend, executed on the host, or on a GPU in the GPU's build.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "../../csrc/cuda/ops.h"
#include "conv_problem.h"
#ifdef SPECDEC_SIMT
#include "session.h"
#else
#include "gpu/mirror.h"
#endif

namespace specdec::cuda {
namespace {

using conv_test::Case;
using conv_test::Problem;
using test::kNaN;

#ifdef SPECDEC_SIMT

using simt::Direction;

int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

template <typename T>
void add_optional(simt::Memory& memory, const char* name, const T* data, int64_t count) {
  if (data != nullptr && count > 0) memory.add(name, data, count, Direction::kInput);
}

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
  add_optional(memory, "path", path.path, B * path.max_length);
  add_optional(memory, "path_lengths", path.lengths, B);
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
  add_optional(memory, "weight", p.weight, p.C * p.W);
  add_optional(memory, "bias", p.bias, p.C);
  add_optional(memory, "slots", p.slots, p.B);
  add_optional(memory, "parents", p.parents, p.B * p.N);
  add_optional(memory, "lengths", p.lengths, p.B);
  if (p.has_prefix) add_optional(memory, "prefix_parents", p.prefix_parents, p.B * p.prefix.nodes);
  if (p.B * p.N > 0) memory.add("y", p.y, p.B * p.N * p.C * size_of(p.x.dtype), Direction::kOutput);
}

// Runs p and expects a clean report and every element of y written.
simt::Report run(const ConvVerifyParams& p, uint64_t seed = 1) {
  simt::Session session({seed});
  add_memory(session.memory, p);
  EXPECT_EQ(conv_verify(p, &session), Status::kOk);
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
  add_optional(session.memory, "slots", p.slots, p.B);
  EXPECT_EQ(conv_commit(p, &session), Status::kOk);
  EXPECT_TRUE(session.report.clean()) << session.report.to_string();
  return session.report;
}

#else

template <typename Params>
void run(const Params& p, uint64_t = 0) {
  EXPECT_EQ(gpu::call(p), Status::kOk);
}

#endif

// An accepted path of every row into inputs of their own.
struct Round {
  Round(Problem& problem, int64_t nodes, std::vector<int32_t> path_lengths)
      : nodes(nodes), lengths(std::move(path_lengths)) {
    const Case& c = problem.c;
    problem.fill(x, c.B * nodes * problem.x_stride);
    for (size_t i = 0; i < x.size(); ++i) {
      if (static_cast<int64_t>(i) % problem.x_stride >= c.C) x[i] = kNaN;
    }
    input = problem.view(x, &typed, nodes);
    longest = nodes - 1;
    for (int64_t b = 0; b < c.B; ++b) {
      // All nodes but one, in order; what lies beyond the length is no node at all.
      const int64_t skipped = static_cast<int64_t>(problem.rng() % nodes);
      for (int64_t i = 0; i < longest; ++i) {
        path.push_back(i < lengths[b] ? static_cast<int32_t>(i + (i >= skipped)) : 1 << 30);
      }
    }
  }
  PathView view() const { return {path.data(), lengths.data(), longest}; }

  int64_t nodes, longest;
  std::vector<int32_t> lengths, path;
  std::vector<float> x;
  test::Buffer typed;
  ConvInputView input;
};

// What the state must be after `round`.
std::vector<float> moved(const Problem& problem, const Round& round) {
  const Case& c = problem.c;
  std::vector<float> state = problem.state;
  for (int64_t b = 0; b < c.B; ++b) {
    if (problem.slots[b] < 0) continue;
    std::vector<float> rows;  // the old window, then the accepted inputs
    const float* window = &problem.state[problem.slots[b] * problem.slot_stride];
    rows.assign(window, window + (c.W - 1) * c.C);
    for (int32_t i = 0; i < round.lengths[b]; ++i) {
      const float* x = &round.x[(b * round.nodes + round.path[b * round.longest + i]) * problem.x_stride];
      rows.insert(rows.end(), x, x + c.C);
    }
    std::copy(rows.end() - (c.W - 1) * c.C, rows.end(),
              state.begin() + problem.slots[b] * problem.slot_stride);
  }
  return state;
}

// The same bits, whatever the bits of what is no number.
bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
    return std::memcmp(&x, &y, sizeof(float)) == 0 || (std::isnan(x) && std::isnan(y));
  });
}

// The types a call may have: float32 throughout, or 16 bits with a window in either.
const std::pair<DType, DType> kTypes[] = {{DType::kFloat32, DType::kFloat32},
                                          {DType::kBFloat16, DType::kBFloat16},
                                          {DType::kBFloat16, DType::kFloat32},
                                          {DType::kFloat16, DType::kFloat16},
                                          {DType::kFloat16, DType::kFloat32}};

TEST(CudaConvVerify, FollowsReference) {
  unsigned seed = 0;
  for (const auto& [dtype, state] : kTypes) {
    for (const int64_t W : {1, 2, 4, 5, 16}) {
      for (const int64_t C : {1, 40, 77, 136}) {
        for (const bool tree : {false, true}) {
          Case c;
          c.B = 1 + seed % 3, c.N = 1 + seed % 9, c.C = C, c.W = W, c.tree = tree;
          c.bias = seed % 2, c.silu = seed % 3 > 0, c.prefix = seed % 4 == 3 ? 5 : 0;
          c.dtype = dtype, c.state = state;
          c.gap = C % 8 == 0 ? 8 : 5;  // 16-byte accesses, or element by element
          SCOPED_TRACE(testing::Message() << "W " << W << " C " << C << " N " << c.N << " prefix " << c.prefix
                                          << " dtype " << static_cast<int>(dtype));
          Problem problem(c, seed);
          run(problem.params(), seed++);
          problem.collect();
          problem.expect_reference();
        }
      }
    }
  }
}

TEST(CudaConvVerify, PaddingIsZeroAndUnread) {
  for (const int64_t gap : {5, 8}) {
    Case c;
    c.B = 4, c.N = 6, c.tree = true, c.C = 40, c.gap = gap;
    Problem problem(c, 7);
    problem.slots[1] = -1;
    problem.lengths = {3, 6, 0, 99};
    for (const int64_t n : {3, 4, 5}) {
      std::fill_n(&problem.x[n * problem.x_stride], c.C, kNaN);
      problem.parents[n] = 1 << 30;
    }
    run(problem.params());
    problem.expect_reference();
  }
}

TEST(CudaConvVerify, NoRowsNoNodes) {
  for (const auto& [B, N] : {std::pair<int64_t, int64_t>{0, 4}, {3, 0}}) {
    Case c;
    c.B = B, c.N = N;
    Problem problem(c, 1);
    run(problem.params());
  }
}

// A stream cut anywhere, each piece with the deferred commit of the piece before, gives the bits of one call,
// which is itself cut into chunks.
TEST(CudaConvVerify, SplitsAreBitEqual) {
  for (const int64_t W : {2, 4, 7}) {
    Case c;
    c.N = 300, c.C = 40, c.W = W, c.gap = 8;
    Problem whole(c, 3);
    run(whole.params());
    whole.expect_reference();
    std::vector<float> pieces(whole.y.size(), kNaN);
    std::vector<float> state = whole.state;
    const std::vector<float> want = whole.y;
    int64_t done = 0, last = 0;
    while (done < c.N) {
      const int64_t n = std::min<int64_t>(1 + whole.rng() % 40, c.N - done);
      ConvVerifyParams p = whole.params();
      p.N = n;
      p.lengths = nullptr;
      p.state.data = state.data();
      p.x.x = whole.x.data() + done * whole.x_stride;
      p.x.nodes = n;
      p.x.stride_b = n * whole.x_stride;
      p.y = pieces.data() + done * c.C;
      p.has_pending = last > 0;
      p.pending = p.x;
      p.pending.x = whole.x.data() + (done - last) * whole.x_stride;
      p.pending.nodes = last;
      p.pending.stride_b = last * whole.x_stride;
      p.pending_path.max_length = last;
      run(p);
      done += n;
      last = n;
    }
    EXPECT_TRUE(same(pieces, want)) << "W " << W;
  }
}

// A node's bits are those of the chain of its ancestors alone, whatever else the call holds and however it is
// cut.
TEST(CudaConvVerify, TreeNodesAreBitEqualToTheirPaths) {
  Case c;
  c.N = 24, c.C = 40, c.tree = true, c.gap = 8;
  Problem tree(c, 11);
  const ConvVerifyParams p = tree.params();
  run(p);
  const std::vector<float> want = tree.y;
  for (int64_t leaf = 0; leaf < c.N; ++leaf) {
    std::vector<int64_t> path;
    for (int64_t n = leaf; n >= 0; n = tree.parents[n]) path.insert(path.begin(), n);
    std::vector<float> x, y(path.size() * c.C);
    for (const int64_t n : path) {
      x.insert(x.end(), &tree.x[n * tree.x_stride], &tree.x[n * tree.x_stride] + c.C);
    }
    ConvVerifyParams chain = p;
    chain.N = static_cast<int64_t>(path.size());
    chain.parents = nullptr;
    chain.lengths = nullptr;
    chain.x = {x.data(), DType::kFloat32, chain.N, chain.N * c.C, c.C};
    chain.y = y.data();
    run(chain);
    EXPECT_EQ(std::memcmp(&y[y.size() - c.C], &want[leaf * c.C], c.C * sizeof(float)), 0) << "node " << leaf;
  }
}

// Verify with pending equals conv_commit and then verify, outputs and window, to the bit.
TEST(CudaConvVerify, PendingEqualsCommitFirst) {
  unsigned seed = 20;
  for (const auto& [dtype, state_type] : kTypes) {
    for (const int64_t W : {2, 4, 16}) {
      for (const int64_t gap : {5, 8}) {
        Case c;
        c.B = 5, c.N = 5, c.C = 72, c.W = W, c.tree = true, c.dtype = dtype, c.state = state_type,
        c.gap = gap;
        Problem problem(c, seed++);
        problem.lengths = {0, 5, 5, 2, 5};  // the window moves on where nothing is verified, too
        problem.slots[2] = -1;
        Round round(problem, 7, {2, 0, 3, 6, 1});
        const std::vector<float> before = problem.state, want_state = moved(problem, round);

        ConvCommitParams commit;
        commit.B = c.B, commit.C = c.C, commit.W = c.W;
        commit.x = round.input;
        commit.path = round.view();
        commit.state = problem.params().state;
        commit.slots = problem.slots.data();
        run(commit);
        problem.collect();
        EXPECT_TRUE(same(problem.state, want_state)) << "W " << W;
        run(problem.params());
        problem.collect();
        problem.expect_reference();
        const std::vector<float> want = problem.y;

        problem.state = before;
        ConvVerifyParams p = problem.params();
        p.has_pending = true;
        p.pending = round.input;
        p.pending_path = round.view();
        run(p);
        problem.collect();
        EXPECT_TRUE(same(problem.state, want_state)) << "W " << W;
        EXPECT_TRUE(same(problem.y, want)) << "W " << W;
      }
    }
  }
}

// Many sequences: a block takes several of them.
TEST(CudaConvVerify, ManySequences) {
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
TEST(CudaConvVerify, TrafficIsTheLeast) {
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
        for (const simt::BufferCounts& buffer : counts.buffers) {
          if (buffer.name == "x") {
            EXPECT_EQ(buffer.bytes_read, c.B * N * row);
          } else if (buffer.name == "y") {
            EXPECT_EQ(buffer.bytes_written, c.B * N * row);
          } else if (buffer.name == "pending") {
            EXPECT_EQ(buffer.bytes_read, (2 + 3 + 3 + 1) * row);
          } else if (buffer.name == "state") {
            EXPECT_EQ(buffer.bytes_read, (pending ? 1 + 0 + 0 + 2 : 12) * window_row);
            EXPECT_EQ(buffer.bytes_written, pending ? 12 * window_row : 0);
          } else {
            continue;
          }
          least += buffer.bytes_read + buffer.bytes_written;
        }
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

TEST(CudaConvCommit, TrafficIsTheLeast) {
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
  for (const simt::BufferCounts& buffer : counts.buffers) {
    if (buffer.name == "state") {
      EXPECT_EQ(buffer.bytes_read, c.C * 4);         // one row survives the path of two
      EXPECT_EQ(buffer.bytes_written, 6 * c.C * 4);  // an empty path touches nothing
    } else if (buffer.name == "x") {
      EXPECT_EQ(buffer.bytes_read, (2 + 3) * c.C * 4);
    }
  }
  EXPECT_LE(counts.read.sectors_per_request(), 4.0);
  EXPECT_LE(counts.write.sectors_per_request(), 4.0);
}

// A slot beyond 2^31 elements.
TEST(CudaConvVerify, OffsetsAre64Bit) {
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

TEST(CudaConvVerify, RefusesWhatItCannotRun) {
  simt::Session session;
  Problem problem(Case{}, 1);
  ConvVerifyParams p = problem.params();
  p.W = 17;
  EXPECT_EQ(conv_verify(p, &session), Status::kUnsupported);
  p = problem.params();
  p.state.dtype = DType::kBFloat16;
  EXPECT_EQ(conv_verify(p, &session), Status::kUnsupported);
  p = problem.params();
  p.has_pending = p.has_prefix = true;
  EXPECT_EQ(conv_verify(p, &session), Status::kInvalidArgument);
  p = problem.params();
  p.parents = problem.parents.data();
  p.N = 513;
  EXPECT_EQ(conv_verify(p, &session), Status::kUnsupported);
  EXPECT_TRUE(session.report.kernels.empty());
}
#endif

}  // namespace
}  // namespace specdec::cuda
