// tree_attention of the CUDA backend, executed on the host, or on a GPU in the GPU's build.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "../../csrc/cuda/ops.h"
#include "attention_problem.h"
#ifdef SPECDEC_SIMT
#include "counts.h"
#include "session.h"
#else
#include "gpu/mirror.h"
#endif

namespace specdec::attention_test {
namespace {

#ifdef SPECDEC_SIMT

using simt::Direction;

int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

bool padding(const TreeAttentionParams& p, int64_t b) { return p.slots != nullptr && p.slots[b] < 0; }

// Rows that a call may read hold values: those of the first lengths[i] of dimension n.
void add_rows(simt::Memory& memory, const char* name, const void* data, const Strides& s, int64_t first,
              int64_t heads, const std::vector<int64_t>& lengths, int64_t elements, int64_t D, int64_t size) {
  if (elements == 0) return;
  simt::Buffer& buffer = memory.add(name, data, elements * size, Direction::kInput);
  buffer.clear_values(buffer.begin(), elements * size);
  for (int64_t b = 0; b < first; ++b) {
    for (int64_t n = 0; n < lengths[b]; ++n) {
      for (int64_t h = 0; h < heads; ++h) {
        buffer.set_values(buffer.begin() + (b * s.b + n * s.n + h * s.h) * size, D * size);
      }
    }
  }
}

void add_memory(simt::Memory& memory, const TreeAttentionParams& p) {
  const int64_t size = size_of(p.dtype);
  std::vector<int64_t> lengths, earlier, committed(p.cache.slots, 0);
  for (int64_t b = 0; b < p.B; ++b) {
    lengths.push_back(padding(p, b) ? 0 : std::clamp<int64_t>(p.lengths[b], 0, p.N));
    earlier.push_back(padding(p, b) ? 0 : p.prefix.nodes);
    if (!padding(p, b)) committed[p.slots[b]] = p.cache.lengths[p.slots[b]];
  }
  const auto nodes = [&](const char* name, const void* data, const Strides& s, int64_t count, int64_t heads,
                         const std::vector<int64_t>& valid) {
    add_rows(memory, name, data, s, p.B, heads, valid, p.B * count * s.n, p.D, size);
  };
  nodes("q", p.q, p.q_stride, p.N, p.HQ, lengths);
  nodes("k", p.nodes.k, p.nodes.k_stride, p.N, p.HK, lengths);
  nodes("v", p.nodes.v, p.nodes.v_stride, p.N, p.HK, lengths);
  nodes("prefix_k", p.prefix.k, p.prefix.k_stride, p.prefix.nodes, p.HK, earlier);
  nodes("prefix_v", p.prefix.v, p.prefix.v_stride, p.prefix.nodes, p.HK, earlier);
  for (const auto& [name, data, s] : {std::make_tuple("k_cache", p.cache.k, p.cache.k_stride),
                                      std::make_tuple("v_cache", p.cache.v, p.cache.v_stride)}) {
    add_rows(memory, name, data, s, p.cache.slots, p.HK, committed, p.cache.slots * s.b, p.D, size);
  }
  memory.add("cache_lengths", p.cache.lengths, p.cache.slots, Direction::kInput);
  memory.add("slots", p.slots, p.B, Direction::kInput);
  memory.add("parents", p.parents, p.B * p.N, Direction::kInput);
  memory.add("lengths", p.lengths, p.B, Direction::kInput);
  memory.add("prefix_parents", p.prefix_parents, p.B * p.prefix.nodes, Direction::kInput);
  if (p.B * p.N > 0) memory.add("out", p.out, p.B * p.N * p.HQ * p.D * size, Direction::kOutput);
}

// Runs p and expects a clean report and every element of the output written.
simt::Report run(const TreeAttentionParams& p) {
  static uint64_t calls = 0;  // an order of blocks each
  simt::Session session({++calls});
  add_memory(session.memory, p);
  const int64_t bytes = cuda::tree_attention_workspace_bytes(p);
  std::vector<double> space(static_cast<size_t>(bytes / 8));
  if (bytes > 0) session.memory.add("space", static_cast<void*>(space.data()), bytes, Direction::kOutput);
  EXPECT_EQ(cuda::tree_attention(p, {space.data(), bytes}, &session), Status::kOk);
  EXPECT_TRUE(session.report.clean()) << session.report.to_string();
  if (p.B * p.N > 0) {
    EXPECT_EQ(session.memory.at("out").bytes_with_values(), p.B * p.N * p.HQ * p.D * size_of(p.dtype));
  }
  return session.report;
}

// A call that is refused starts nothing.
Status call(const TreeAttentionParams& p) {
  simt::Session session;
  const Status status = cuda::tree_attention(p, {nullptr, INT64_MAX}, &session);
  EXPECT_TRUE(session.report.kernels.empty());
  return status;
}

#else

// What is refused is not looked at.
Status call(const TreeAttentionParams& p) { return cuda::tree_attention(p, {nullptr, INT64_MAX}, nullptr); }

void run(const TreeAttentionParams& p) { EXPECT_EQ(gpu::call(p), Status::kOk); }

#endif

constexpr int64_t kBoundaries[] = {0, 1, 31, 33, 500, 511, 512};

std::vector<Case> cases() {
  std::vector<Case> all;
  constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  for (const int64_t D : {16, 48, 64, 128, 208, 256}) {
    for (const auto& [HQ, HK] : {std::pair<int64_t, int64_t>{1, 1}, {9, 3}, {20, 1}}) {
      const auto i = static_cast<int64_t>(all.size());
      Case c;
      c.B = 1 + i % 2, c.N = 1 + i * 5 % 12, c.HQ = HQ, c.HK = HK, c.D = D, c.dtype = kTypes[i % 3];
      c.prefix = i % 4 == 3 ? 6 : 0, c.committed = i * 37 % 600, c.tree = i % 5 > 0;
      c.gap = i / 3 % 2 == 0 ? 3 : 8;  // element by element, or 16-byte accesses
      all.push_back(c);
    }
  }
  return all;
}

}  // namespace
}  // namespace specdec::attention_test

#include "attention_suite.h"

#ifdef SPECDEC_SIMT

namespace specdec::attention_test {
namespace {

// The cache is read once for the queries of a key head, 16 at a time, and by nobody beyond what is committed.
TEST(TreeAttention, CacheIsReadOnce) {
  Case c;
  c.B = 2, c.N = 5, c.HQ = 6, c.HK = 2, c.D = 64, c.committed = 700, c.gap = 8;
  Problem problem(c, 3);
  const simt::Report report = run(problem.params());
  ASSERT_EQ(report.kernels.size(), 2u);
  int64_t tokens = 0;
  for (const int32_t slot : problem.slots) tokens += problem.cache_lengths[slot];
  for (const char* name : {"k_cache", "v_cache"}) {
    int64_t bytes = 0;
    for (const simt::KernelCounts& kernel : report.kernels) bytes += test::buffer(kernel, name).bytes_read;
    EXPECT_EQ(bytes, tokens * c.HK * c.D * 4) << name;
  }
}

}  // namespace
}  // namespace specdec::attention_test

#endif
