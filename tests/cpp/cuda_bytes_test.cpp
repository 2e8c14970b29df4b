// What every op moves at the shapes of models, counted by the executor, over the least possible: the state,
// inputs, outputs and factors once each. Two counts: of all accesses, and of the footprint, the distinct
// sectors of a launch, which is what memory delivers where the L2 cache holds what blocks share. Prints both.
//
// A batch runs with one sequence, the others are padding: dispatch sees the batch, and sequences move the
// same bytes. What padding writes is known and taken off.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <tuple>

#include "conv_problem.h"
#include "cuda_problem.h"

namespace specdec::test {
namespace {

constexpr int64_t kPending = 4, kWidth = 4;

struct Model {
  const char* name;
  int64_t HK, HV, D;
};
constexpr Model kModels[] = {
    {"HK 16 HV 32 D 128", 16, 32, 128}, {"HK 8 HV 8 D 256", 8, 8, 256}, {"HK 4 HV 8 D 128", 4, 8, 128}};

struct Bytes {
  int64_t all = 0, footprint = 0, least = 0;

  double over_least(int64_t bytes) const { return static_cast<double>(bytes) / static_cast<double>(least); }
  double all_ratio() const { return over_least(all); }
  double footprint_ratio() const { return over_least(footprint); }
};

int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Everything that the one kernel of a session moved, but for `padding` bytes.
Bytes counted(const simt::KernelCounts& counts, int64_t padding, const char* state_file) {
  expect_coalesced(counts, state_file);
  return {counts.read.bytes + counts.write.bytes - padding,
          counts.footprint_read + counts.footprint_written - padding, 0};
}

// Of the whole batch, from those of one sequence.
Bytes of_batch(Bytes bytes, int64_t B) { return {B * bytes.all, B * bytes.footprint, B * bytes.least}; }

void expect_state(const simt::KernelCounts& counts, int64_t reads, int64_t writes) {
  const simt::BufferCounts state = buffer(counts, "state");
  EXPECT_EQ(state.bytes_read, reads);
  EXPECT_EQ(state.footprint_read, reads);
  EXPECT_EQ(state.bytes_written, writes);
  EXPECT_EQ(state.footprint_written, writes);
}

struct Layer {
  Model model;
  int64_t B, N;
  DType dtype;

  Shape shape() const {
    Shape s;
    s.B = B, s.N = N, s.HK = model.HK, s.HV = model.HV, s.DK = s.DV = model.D;
    s.dtype = dtype;
    s.gap = 16;  // tokens begin at sectors
    return s;
  }
  int64_t state_bytes() const { return model.HV * model.D * model.D * 4; }
  int64_t factor_bytes(int64_t nodes) const {
    return nodes * 4 * (model.HK * model.D + model.HV * model.D + model.HV);
  }
  // q, k, v, g, beta of a token.
  int64_t token_bytes() const {
    return (2 * model.HK + model.HV) * model.D * size_of(dtype) + 2 * model.HV * 4;
  }
  int64_t out_bytes() const { return model.HV * model.D * size_of(dtype); }
};

// A problem whose first sequence alone is there, with factors of a round before.
struct OneOfBatch : CudaProblem {
  explicit OneOfBatch(const Layer& layer)
      : CudaProblem(layer.shape(), 7),
        before{Buffer(DType::kFloat32, 0), Buffer(DType::kFloat32, layer.B * kPending * shape.HK * shape.DK),
               Buffer(DType::kFloat32, layer.B * kPending * shape.HV * shape.DV),
               Buffer(DType::kFloat32, layer.B * kPending * shape.HV)} {
    for (Buffer* x : {&before.k, &before.u, &before.g}) std::fill(x->f32.begin(), x->f32.end(), -0.1f);
    std::fill(slots.begin() + 1, slots.end(), -1);
  }
  Outputs before;
};

Bytes verify_bytes(const Layer& layer, Strategy strategy, bool tree) {
  OneOfBatch problem(layer);
  VerifyParams p = problem.params(problem.state, 0, layer.N);
  std::vector<int32_t> parents;  // binary trees
  for (int64_t i = 0; i < layer.B * layer.N; ++i)
    parents.push_back(static_cast<int32_t>((i % layer.N + 1) / 2 - 1));
  if (tree) p.parents = parents.data();
  p.strategy = strategy;
  if (strategy == Strategy::kSolve) p.precision = Precision::kTf32x3;
  p.has_pending = true;
  p.pending = problem.factors(problem.before, kPending);
  p.pending_path = {nullptr, nullptr, kPending};
  problem.run(p);
  const simt::KernelCounts& counts = problem.last().report.kernels.front();
  const int64_t written = layer.N * layer.out_bytes() + layer.factor_bytes(layer.N);
  Bytes bytes =
      counted(counts, (layer.B - 1) * written, strategy == Strategy::kSolve ? "solve_state" : "state_tile");
  expect_state(counts, layer.state_bytes(), layer.state_bytes());
  if (strategy == Strategy::kHybrid) {
    // The states that its chains hand on: cuda_traffic_test.cpp counts them.
    const simt::BufferCounts states = buffer(counts, "states");
    bytes.all -= states.bytes_read + states.bytes_written;
    bytes.footprint -= states.footprint_read + states.footprint_written;
  }
  bytes.least = 2 * layer.state_bytes() + layer.N * layer.token_bytes() + written +
                layer.factor_bytes(kPending) + (tree ? layer.N * 4 : 0);
  return of_batch(bytes, layer.B);
}

Bytes commit_bytes(const Layer& layer, CommitMode mode) {
  OneOfBatch problem(layer);
  CommitParams p = problem.commit_params(problem.state, problem.factors(problem.before, kPending),
                                         {nullptr, nullptr, kPending});
  p.mode = mode;
  EXPECT_EQ(problem.call(p), Status::kOk);
  const simt::KernelCounts& counts = problem.last().report.kernel("Commit");
  Bytes bytes = counted(counts, 0, "state_tile");
  expect_state(counts, layer.state_bytes(), layer.state_bytes());
  bytes.least = 2 * layer.state_bytes() + layer.factor_bytes(kPending);
  return of_batch(bytes, layer.B);
}

Bytes prefill_bytes(const Layer& layer) {
  OneOfBatch problem(layer);
  PrefillParams p;
  problem.fill_common(p, problem.state, 0);
  p.T = layer.N;
  p.precision = Precision::kTf32x3;
  Buffer out(layer.dtype, layer.B * layer.N * layer.model.HV * layer.model.D);
  p.out = out.data();
  EXPECT_EQ(problem.call(p), Status::kOk);
  const simt::KernelCounts& counts = problem.last().report.kernel("Prefill");
  Bytes bytes = counted(counts, (layer.B - 1) * layer.N * layer.out_bytes(), "solve_state");
  expect_state(counts, layer.state_bytes(), layer.state_bytes());
  bytes.least = 2 * layer.state_bytes() + layer.N * (layer.token_bytes() + layer.out_bytes());
  return of_batch(bytes, layer.B);
}

// The convolution in front of the recurrence, over the channels of q, k and v. Its batch runs whole:
// sequences share weights.
struct Convolution {
  explicit Convolution(const Layer& layer)
      : layer(layer), C((2 * layer.model.HK + layer.model.HV) * layer.model.D) {
    // Zeros will do; what is random would take longer than the kernel.
    x = zeros(layer.dtype, layer.B * layer.N * C), before = zeros(layer.dtype, layer.B * kPending * C);
    y = zeros(layer.dtype, layer.B * layer.N * C), state = zeros(layer.dtype, layer.B * (kWidth - 1) * C);
    weight.assign(C * kWidth, 0.5f), bias.assign(C, 0.25f);
    const auto add = [&](const char* name, const void* data, int64_t bytes, simt::Direction direction) {
      session.memory.add(name, data, static_cast<size_t>(bytes), direction);
    };
    add("x", x.data(), x.bytes(), simt::Direction::kInput);
    add("before", before.data(), before.bytes(), simt::Direction::kInput);
    add("y", y.data(), y.bytes(), simt::Direction::kOutput);
    add("state", state.data(), state.bytes(), simt::Direction::kBoth);
    add("weight", weight.data(), C * kWidth * 4, simt::Direction::kInput);
    add("bias", bias.data(), C * 4, simt::Direction::kInput);
  }
  static Buffer zeros(DType dtype, int64_t count) {
    Buffer buffer;
    buffer.dtype = dtype;
    (dtype == DType::kFloat32 ? void(buffer.f32.assign(count, 0.0f)) : void(buffer.half.assign(count, 0)));
    return buffer;
  }
  ConvInputView view(Buffer& rows, int64_t nodes) const {
    return {rows.data(), layer.dtype, nodes, nodes * C, C};
  }
  // The window moves on by more than its rows: it is written and not read.
  int64_t window_bytes() const { return layer.B * (kWidth - 1) * C * size_of(layer.dtype); }

  Bytes verify() {
    ConvVerifyParams p;
    p.B = layer.B, p.N = layer.N, p.C = C, p.W = kWidth;
    p.x = view(x, layer.N);
    p.weight = weight.data(), p.bias = bias.data();
    p.state = {state.data(), layer.dtype, layer.B, (kWidth - 1) * C};
    p.has_pending = true;
    p.pending = view(before, kPending);
    p.pending_path = {nullptr, nullptr, kPending};
    p.y = y.data();
    EXPECT_EQ(cuda::conv_verify(p, &session), Status::kOk);
    Bytes bytes = counted_clean("ConvVerify");
    bytes.least =
        layer.B * layer.N * C * 2 * size_of(layer.dtype) + 2 * window_bytes() + C * (kWidth + 1) * 4;
    return bytes;
  }
  Bytes commit() {
    ConvCommitParams p;
    p.B = layer.B, p.C = C, p.W = kWidth;
    p.x = view(before, kPending);
    p.path = {nullptr, nullptr, kPending};
    p.state = {state.data(), layer.dtype, layer.B, (kWidth - 1) * C};
    EXPECT_EQ(cuda::conv_commit(p, &session), Status::kOk);
    Bytes bytes = counted_clean("ConvCommit");
    bytes.least = 2 * window_bytes();
    return bytes;
  }
  Bytes counted_clean(const char* kernel) const {
    EXPECT_TRUE(session.report.clean()) << session.report.to_string();
    const simt::KernelCounts& counts = session.report.kernel(kernel);
    expect_state(counts, 0, window_bytes());
    return counted(counts, 0, "conv_window");
  }

  Layer layer;
  int64_t C;
  Buffer x, before, y, state;
  std::vector<float> weight, bias;
  simt::Session session;
};

void print(const char* op, const Layer& layer, const Bytes& bytes) {
  std::printf("| %-20s | %-17s | %2d | %3d | %s | %.2f | %.2f |\n", op, layer.model.name,
              static_cast<int>(layer.B), static_cast<int>(layer.N),
              layer.dtype == DType::kFloat32 ? "float32 " : "bfloat16", bytes.all_ratio(),
              bytes.footprint_ratio());
  std::fflush(stdout);
}

// The batch has a block for every multiprocessor even where blocks own the tallest tiles.
bool fills_a_gpu(const Layer& layer) { return layer.B * layer.model.HV * (layer.model.D / 128) >= 128; }

std::vector<Layer> layers(const Model& model, int64_t B, std::initializer_list<int64_t> nodes) {
  std::vector<Layer> all;
  for (const int64_t N : nodes) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) all.push_back({model, B, N, dtype});
  }
  return all;
}

// Memory delivers hardly more than the least. All accesses are held to that where the batch fills a GPU.
// Where it does not, tiles have 32 value rows, or a key head several blocks, so that there are blocks for
// more multiprocessors; each of them reads its tokens' q and k, out of the L2 cache: up to 8 times at DV 256.
void expect_near_the_least(const Bytes& bytes, bool filled) {
  EXPECT_LE(bytes.footprint_ratio(), 1.15);
  EXPECT_LE(bytes.all_ratio(), filled ? 1.15 : 1.75);
}

class LayerBytes : public testing::TestWithParam<std::tuple<int, int64_t>> {};
INSTANTIATE_TEST_SUITE_P(Models, LayerBytes,
                         testing::Combine(testing::Values(0, 1, 2), testing::Values(1, 4, 16)));

// One decoding layer, its convolution and its recurrence with a pending round.
TEST_P(LayerBytes, AreNearTheLeast) {
  const auto& [model, B] = GetParam();
  for (const Layer& layer : layers(kModels[model], B, {8, 16, 32})) {
    SCOPED_TRACE(testing::Message() << layer.model.name << " B " << B << " N " << layer.N);
    const Bytes convolution = Convolution(layer).verify();
    const Bytes recurrence = verify_bytes(layer, Strategy::kSerial, false);
    const Bytes both{convolution.all + recurrence.all, convolution.footprint + recurrence.footprint,
                     convolution.least + recurrence.least};
    print("conv_verify", layer, convolution);
    print("verify serial, chain", layer, recurrence);
    print("both", layer, both);
    // Every block reads the weights of its channels, and has one sequence until blocks fill the GPU. 16
    // sequences of 8 bfloat16 nodes with a block each would be at 1.48.
    EXPECT_LE(convolution.footprint_ratio(), 1.15);
    EXPECT_LE(convolution.all_ratio(), 1.5);
    const bool filled = fills_a_gpu(layer);
    expect_near_the_least(recurrence, filled);
    expect_near_the_least(both, filled);
  }
}

// Heads of the same kinds, so few of them that tiles are small and solve has a block a tile: what a batch of
// one is at any number of heads.
constexpr Model kSmall[] = {{"HK 1 HV 2 D 128", 1, 2, 128}, {"HK 1 HV 1 D 256", 1, 1, 256}};

class OpBytes : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Heads, OpBytes, testing::Values(0, 1));

TEST_P(OpBytes, AreNearTheLeast) {
  for (const Layer& layer : layers(kSmall[GetParam()], 1, {8, 32})) {
    SCOPED_TRACE(testing::Message() << layer.model.name << " N " << layer.N);
    const auto expect = [&](const char* op, const Bytes& bytes, bool filled = false) {
      SCOPED_TRACE(op);
      print(op, layer, bytes);
      expect_near_the_least(bytes, filled);
    };
    expect("verify serial, tree", verify_bytes(layer, Strategy::kSerial, true));
    expect("verify solve, tree", verify_bytes(layer, Strategy::kSolve, true));
    expect("verify hybrid, tree", verify_bytes(layer, Strategy::kHybrid, true));
    // Every tile reads q and k, and all it has to do with them is on tensor cores: no taller tile would help.
    const Bytes prefill = prefill_bytes(layer);
    print("prefill", layer, prefill);
    EXPECT_LE(prefill.footprint_ratio(), 1.15);
    if (layer.N > 8) continue;
    expect("commit exact", commit_bytes(layer, CommitMode::kExact), true);
    expect("commit fast", commit_bytes(layer, CommitMode::kFast), true);
    expect("conv_commit", Convolution(layer).commit(), true);
  }
}

TEST(LargeBatchBytes, AreNearTheLeast) {
  // Tall tiles; of larger trees their kept states, 64 KB each, would not fit into shared memory.
  for (const Layer& layer : layers(kModels[2], 16, {8, 32})) {
    SCOPED_TRACE(testing::Message() << layer.model.name << " N " << layer.N);
    const Bytes bytes = verify_bytes(layer, Strategy::kSerial, true);
    print("verify serial, tree", layer, bytes);
    expect_near_the_least(bytes, layer.N == 8);
  }
  for (const Layer& layer : layers(kModels[0], 16, {8, 32})) {  // all tiles of a key head in a block
    SCOPED_TRACE(testing::Message() << layer.model.name << " N " << layer.N);
    const Bytes bytes = verify_bytes(layer, Strategy::kSolve, true);
    print("verify solve, tree", layer, bytes);
    expect_near_the_least(bytes, true);
  }
}

}  // namespace
}  // namespace specdec::test
