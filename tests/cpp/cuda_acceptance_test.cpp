// Greedy and sampled acceptance of the CUDA backend, executed on the host, or on a GPU in the GPU's build,
// against the rules as one reads them.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "../../csrc/cuda/ops.h"
#include "buffer.h"
#ifdef SPECDEC_SIMT
#include "counts.h"
#include "session.h"
#else
#include "gpu/mirror.h"
#endif

namespace specdec::cuda {
namespace {

using test::kNaN;

#ifdef SPECDEC_SIMT
using simt::Direction;
using Report = simt::Report;
#else
struct Report {};  // nothing is counted on a GPU
#endif

// A round's candidates of B rows, and what is decided about them.
struct Round {
  Round(int64_t B, int64_t N, int64_t V, bool tree, unsigned seed) : B(B), N(N), V(V), tree(tree), rng(seed) {
    for (int64_t b = 0; b < B; ++b) {
      lengths.push_back(static_cast<int32_t>(b % 5 == 3 ? 0 : N - below(N / 2 + 1)));
      for (int64_t n = 0; n < N; ++n) {
        const bool valid = n < lengths[b];
        tokens.push_back(valid ? below(V) : int64_t{1} << 60);
        parents.push_back(valid ? static_cast<int32_t>(n == 0 ? -1 : tree ? below(n) : n - 1) : 1 << 30);
      }
    }
    most = N + 3;
    path.assign(B * most, -7), path_lengths.assign(B, -7), next_token.assign(B, -7);
  }

  int64_t below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(rng); }
  float unit() { return std::uniform_real_distribution<float>()(rng); }

  DraftView draft() const { return {tokens.data(), tree ? parents.data() : nullptr, lengths.data()}; }
  AcceptedView accepted() { return {path.data(), path_lengths.data(), next_token.data(), most}; }

#ifdef SPECDEC_SIMT
  void add_memory(simt::Memory& memory) {
    memory.add("tokens", tokens.data(), tokens.size(), Direction::kInput);
    if (tree) memory.add("parents", parents.data(), parents.size(), Direction::kInput);
    memory.add("lengths", lengths.data(), lengths.size(), Direction::kInput);
    memory.add("path", path.data(), path.size(), Direction::kOutput);
    memory.add("path_lengths", path_lengths.data(), path_lengths.size(), Direction::kOutput);
    memory.add("next_token", next_token.data(), next_token.size(), Direction::kOutput);
  }
#endif

  // What the target wants after each node decides row b.
  void expect_walk(int64_t b, const std::vector<int64_t>& want) const {
    std::vector<int64_t> depth(N, -1), nodes;  // of accepted nodes
    int64_t leaf = 0;
    if (lengths[b] > 0) depth[0] = 0;
    for (int64_t n = 1; n < lengths[b]; ++n) {
      const int64_t parent = parents[b * N + n];
      if (depth[parent] >= 0 && want[parent] >= 0 && tokens[b * N + n] == want[parent])
        depth[n] = depth[parent] + 1;
      if (depth[n] > depth[leaf]) leaf = n;
    }
    for (int64_t n = leaf; lengths[b] > 0 && n >= 0; n = parents[b * N + n]) nodes.insert(nodes.begin(), n);
    expect(b, nodes, nodes.empty() ? 0 : want[leaf]);
  }

  void expect(int64_t b, const std::vector<int64_t>& nodes, int64_t token) const {
    ASSERT_EQ(path_lengths[b], static_cast<int64_t>(nodes.size())) << "row " << b;
    EXPECT_EQ(next_token[b], token) << "row " << b;
    for (int64_t i = 0; i < most; ++i) {
      EXPECT_EQ(path[b * most + i], i < static_cast<int64_t>(nodes.size()) ? nodes[i] : 0)
          << "row " << b << " step " << i;
    }
  }

  int64_t B, N, V, most;
  bool tree;
  std::mt19937 rng;
  std::vector<int64_t> tokens, next_token;
  std::vector<int32_t> parents, lengths, path, path_lengths;
};

#ifdef SPECDEC_SIMT
// Rows [B, N, V] with gaps; those beyond `lengths` hold no values.
void add_rows(simt::Memory& memory, const char* name, const test::Buffer& rows, int64_t B, int64_t N,
              int64_t V, int64_t stride, const std::vector<int32_t>& lengths, int64_t less) {
  const int64_t size = rows.dtype == DType::kFloat32 ? 4 : 2;
  simt::Buffer& buffer = memory.add(name, rows.data(), rows.bytes(), Direction::kInput);
  buffer.clear_values(buffer.begin(), rows.bytes());
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t n = 0; n < lengths[b] - less; ++n) {
      buffer.set_values(buffer.begin() + (b * N + n) * stride * size, V * size);
    }
  }
}

#endif

struct Greedy : Round {
  Greedy(int64_t B, int64_t N, int64_t V, bool tree, DType dtype, int64_t gap, unsigned seed)
      : Round(B, N, V, tree, seed), stride(V + gap), logits(dtype, B * N * (V + gap)) {
    want.resize(B * N);
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t n = 0; n < lengths[b]; ++n) {
        // Few values, so that the largest occurs often.
        for (int64_t i = 0; i < V; ++i) set(b, n, i, static_cast<float>(below(4)) - 2.0f);
      }
    }
  }

  void set(int64_t b, int64_t n, int64_t i, float x) { logits.set((b * N + n) * stride + i, x); }
  double at(int64_t b, int64_t n, int64_t i) const { return logits[(b * N + n) * stride + i]; }

  // Most drafts become right.
  void draft_well() {
    find();
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t n = 1; n < lengths[b]; ++n) {
        if (below(4) > 0) tokens[b * N + n] = want[b * N + parents[b * N + n]];
      }
    }
  }

  void find() {
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t n = 0; n < lengths[b]; ++n) {
        int64_t best = 0;
        bool numbers = true;
        for (int64_t i = 0; i < V; ++i) {
          numbers = numbers && !std::isnan(at(b, n, i));
          if (at(b, n, i) > at(b, n, best)) best = i;
        }
        want[b * N + n] = numbers && std::isfinite(at(b, n, best)) ? best : -1;
      }
    }
  }

  Report check() {
    AcceptGreedyParams p;
    p.B = B, p.N = N, p.V = V;
    p.logits = logits.data(), p.dtype = logits.dtype, p.stride_b = N * stride, p.stride_n = stride;
    p.draft = draft(), p.accepted = accepted();
    const Report report = call(p);
    find();
    for (int64_t b = 0; b < B; ++b) expect_walk(b, {want.begin() + b * N, want.begin() + (b + 1) * N});
    return report;
  }

#ifdef SPECDEC_SIMT
  Report call(const AcceptGreedyParams& p) {
    simt::Session session({3});
    add_memory(session.memory);
    add_rows(session.memory, "logits", logits, B, N, V, stride, lengths, 0);
    std::vector<uint64_t> work(accept_greedy_workspace_bytes(p) / sizeof(uint64_t));
    session.memory.add("workspace", work.data(), work.size(), Direction::kOutput);
    EXPECT_EQ(accept_greedy(p, {work.data(), accept_greedy_workspace_bytes(p)}, &session), Status::kOk);
    EXPECT_TRUE(session.report.clean()) << session.report.to_string();
    for (const simt::KernelCounts& counts : session.report.kernels) {
      // A walk reads what it has of a node's parent: the tree decides on the banks.
      if (counts.kernel.find("Walk") != std::string::npos) continue;
      EXPECT_LE(counts.shared.worst, 2) << counts.kernel;
    }
    return session.report;
  }
#else
  Report call(const AcceptGreedyParams& p) {
    EXPECT_EQ(gpu::call(p), Status::kOk);
    return {};
  }
#endif

  int64_t stride;
  test::Buffer logits;
  std::vector<int64_t> want;
};

TEST(CudaAcceptGreedy, FollowsTheRule) {
  unsigned seed = 0;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t V : {1, 7, 1000, 8193, 20000}) {
      for (const bool tree : {false, true}) {
        const int64_t N = V > 1000 ? 4 : 1 + seed % 40;
        Greedy round(V > 1000 ? 2 : 5, N, V, tree, dtype, V % 8 == 0 ? 8 : 3, seed++);
        round.draft_well();
        SCOPED_TRACE(testing::Message() << "V " << V << " N " << N << " tree " << tree);
        round.check();
      }
    }
  }
}

// A row with a NaN or without a finite maximum ends the walk that comes to it, and no other.
TEST(CudaAcceptGreedy, NumbersThatAreNotFinite) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const float wrong : {kNaN, INFINITY, -INFINITY}) {
      for (const int64_t node : {0, 2, 5}) {
        Greedy round(1, 6, 40, false, dtype, 0, 5);
        round.lengths[0] = 6;
        for (int64_t n = 0; n < 6; ++n) {
          round.parents[n] = static_cast<int32_t>(n) - 1;
          for (int64_t i = 0; i < 40; ++i) round.set(0, n, i, i % 3 == 0 ? -INFINITY : -1.0f);
          round.set(0, n, 10 + n, -0.0f);
          round.set(0, n, 30, 0.0f);  // equals -0: the smaller token stays
          round.tokens[n] = 9 + n;
        }
        round.set(0, node, 38, wrong);
        if (wrong < 0.0f) {
          for (int64_t i = 0; i < 40; ++i) round.set(0, node, i, wrong);
        }
        if (node < 5) round.tokens[node + 1] = -1;  // equals no token that is wanted
        round.check();
        EXPECT_EQ(round.path_lengths[0], node + 1);
        EXPECT_EQ(round.next_token[0], -1);
      }
    }
  }
}

// A wide tree of equal tokens: the lowest of the deepest nodes.
TEST(CudaAcceptGreedy, RepeatedSiblings) {
  Greedy round(3, 200, 16, true, DType::kFloat32, 0, 8);
  for (int64_t b = 0; b < 3; ++b) {
    for (int64_t n = 0; n < round.lengths[b]; ++n) {
      round.tokens[b * 200 + n] = 3;
      round.set(b, n, 3, 100.0f);
    }
  }
  round.check();
  EXPECT_GT(round.path_lengths[0], 3);
}

#ifdef SPECDEC_SIMT
TEST(CudaAcceptGreedy, ReadsEveryRowOnce) {
  Greedy round(2, 4, 16384, false, DType::kBFloat16, 8, 1);
  const Report report = round.check();
  const simt::KernelCounts& counts = report.kernel("GreedyParts");
  const int64_t rows = round.lengths[0] + round.lengths[1];
  EXPECT_EQ(test::buffer(counts, "logits").bytes_read, rows * 16384 * 2);
  EXPECT_LE(counts.read.bytes, 1.01 * static_cast<double>(rows * 16384 * 2));
  EXPECT_LE(counts.read.sectors_per_request(), 4.0);
}
#endif

#ifdef SPECDEC_SIMT
TEST(CudaAcceptance, RefusesWhatItCannotRun) {
  simt::Session session;
  Round round(1, 4, 10, true, 1);
  AcceptGreedyParams greedy;
  greedy.B = 1, greedy.N = 4, greedy.V = 10;
  greedy.draft = round.draft(), greedy.accepted = round.accepted();
  EXPECT_EQ(accept_greedy(greedy, {}, &session), Status::kInvalidArgument);  // no workspace
  std::vector<uint64_t> work(100);
  greedy.accepted.max_length = 3;
  EXPECT_EQ(accept_greedy(greedy, {work.data(), 800}, &session), Status::kInvalidArgument);
  EXPECT_TRUE(session.report.kernels.empty());
}
#endif

}  // namespace
}  // namespace specdec::cuda
