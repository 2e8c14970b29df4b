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
      if (depth[parent] >= 0 && tokens[b * N + n] == want[parent]) depth[n] = depth[parent] + 1;
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
        for (int64_t i = 1; i < V && !std::isnan(at(b, n, best)); ++i) {
          if (std::isnan(at(b, n, i)) || at(b, n, i) > at(b, n, best)) best = i;
        }
        want[b * N + n] = best;
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

TEST(CudaAcceptGreedy, NumbersThatAreNotFinite) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    Greedy round(1, 6, 40, false, dtype, 0, 5);
    round.lengths[0] = 6;
    for (int64_t n = 0; n < 6; ++n) {
      round.parents[n] = static_cast<int32_t>(n) - 1;
      for (int64_t i = 0; i < 40; ++i) round.set(0, n, i, n < 2 ? -INFINITY : n == 2 ? -0.0f : -1.0f);
    }
    round.set(0, 1, 17, -5.0f);
    round.set(0, 2, 9, 0.0f);  // equals -0: the smaller token stays
    round.set(0, 3, 33, INFINITY);
    if (dtype == DType::kFloat32)
      round.set(0, 4, 11, kNaN), round.set(0, 4, 20, kNaN), round.set(0, 4, 21, INFINITY);
    for (int64_t i = 0; i < 6; ++i) round.tokens[i] = 0;
    round.draft_well();
    round.tokens[1] = 0, round.tokens[2] = 17, round.tokens[3] = 0, round.tokens[4] = 33;
    round.check();
    EXPECT_GE(round.path_lengths[0], 5);
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

struct Sampled : Round {
  Sampled(int64_t B, int64_t N, int64_t V, bool tree, int64_t gap, unsigned seed)
      : Round(B, N, V, tree, seed), stride(V + gap), p(DType::kFloat32, B * N * (V + gap)), q(p) {
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t n = 0; n < lengths[b]; ++n) {
        fill(p, row(b, n));
        fill(q, row(b, n));
        // Drafts are likely ones, most of them with p a good part of q.
        if (n > 0) tokens[b * N + n] = likely(q, row(b, parents[b * N + n]));
      }
    }
    for (int64_t i = 0; i < B * N; ++i) {
      accept.push_back(std::uniform_real_distribution<double>(0.0, 0.5)(rng));
      sample.push_back(std::uniform_real_distribution<double>()(rng));
    }
  }

  int64_t row(int64_t b, int64_t n) const { return (b * N + n) * stride; }

  // Probabilities with zeros, most of the mass on a few tokens.
  void fill(test::Buffer& rows, int64_t at) {
    double sum = 0.0;
    std::vector<double> x(V);
    for (double& e : x) sum += e = below(3) == 0 ? 0.0 : std::pow(unit(), 40.0) + 1e-6;
    for (int64_t i = 0; i < V; ++i) rows.set(at + i, static_cast<float>(sum > 0.0 ? x[i] / sum : i == 0));
  }
  int64_t likely(const test::Buffer& rows, int64_t at) { return inverse(rows, at, false, unit()); }

  // The first token at which the cumulative sum of weights passes u times the whole; -1 without such a sum.
  int64_t inverse(const test::Buffer& rows, int64_t at, bool residual, double u) const {
    std::vector<double> weight(V);
    double sum = 0.0;
    for (int64_t i = 0; i < V; ++i) {
      weight[i] = rows[at + i];
      if (residual) weight[i] = std::isnan(weight[i]) ? weight[i] : std::max(weight[i] - q[at + i], 0.0);
      sum += weight[i];
    }
    if (residual && sum == 0.0) return inverse(rows, at, false, u);
    if (!(sum > 0.0 && sum < INFINITY)) return -1;
    double passed = 0.0;
    for (int64_t i = 0; i < V; ++i) {
      passed += weight[i];
      if (passed > u * sum) return i;
    }
    return -1;
  }

  Report run(bool drafted) {
    AcceptSampledParams params;
    params.B = B, params.N = N, params.V = V;
    params.p_target = p.f32.data(), params.target_stride_b = N * stride, params.target_stride_n = stride;
    if (drafted)
      params.p_draft = q.f32.data(), params.draft_stride_b = N * stride, params.draft_stride_n = stride;
    params.accept_uniforms = accept.data(), params.sample_uniforms = sample.data();
    params.draft = draft(), params.accepted = accepted();
    return call(params);
  }

#ifdef SPECDEC_SIMT
  Report call(const AcceptSampledParams& params) {
    simt::Session session({4});
    add_memory(session.memory);
    add_rows(session.memory, "p", p, B, N, V, stride, lengths, 0);
    if (params.p_draft != nullptr) add_rows(session.memory, "q", q, B, N, V, stride, lengths, 1);
    session.memory.add("accept", accept.data(), accept.size(), Direction::kInput);
    session.memory.add("sample", sample.data(), sample.size(), Direction::kInput);
    const int64_t bytes = accept_sampled_workspace_bytes(params);
    std::vector<double> work(bytes / 8 + 1);
    session.memory.add("workspace", static_cast<void*>(work.data()), bytes, Direction::kOutput);
    EXPECT_EQ(accept_sampled(params, {work.data(), bytes}, &session), Status::kOk);
    EXPECT_TRUE(session.report.clean()) << session.report.to_string();
    for (const simt::KernelCounts& counts : session.report.kernels) {
      // A walk reads what it has of a node's parent: the tree decides on the banks.
      if (counts.kernel.find("Walk") != std::string::npos) continue;
      EXPECT_LE(counts.shared.worst, 2) << counts.kernel;
    }
    return session.report;
  }
#else
  Report call(const AcceptSampledParams& params) {
    EXPECT_EQ(gpu::call(params), Status::kOk);
    return {};
  }
#endif

  Report check(bool drafted) {
    Report report = run(drafted);
    for (int64_t b = 0; b < B; ++b) drafted ? expect_chain(b) : expect_draws(b);
    return report;
  }

  void expect_chain(int64_t b) const {
    if (lengths[b] == 0) return expect(b, {}, 0);
    std::vector<int64_t> nodes = {0};
    for (int64_t i = 0; i < lengths[b] - 1; ++i) {
      const int64_t x = row(b, i) + tokens[b * N + i + 1];
      if (!(q[x] > 0.0 && accept[b * N + i] * q[x] < p[x])) {
        return expect(b, nodes, inverse(p, row(b, i), true, sample[b * N + i]));
      }
      nodes.push_back(i + 1);
    }
    expect(b, nodes, inverse(p, row(b, lengths[b] - 1), false, sample[b * N + lengths[b] - 1]));
  }

  void expect_draws(int64_t b) const {
    std::vector<int64_t> want, depth;
    for (int64_t n = 0; n < lengths[b]; ++n) {
      depth.push_back(n == 0 ? 0 : depth[parents[b * N + n]] + 1);
      want.push_back(inverse(p, row(b, n), false, sample[b * N + depth[n]]));
    }
    expect_walk(b, want);
  }

  int64_t stride;
  test::Buffer p, q;
  std::vector<double> accept, sample;
};

TEST(CudaAcceptSampled, FollowsTheRule) {
  unsigned seed = 0;
  int64_t accepted = 0, rounds = 0;
  for (const bool drafted : {true, false}) {
    for (const bool tree : {false, true}) {
      if (drafted && tree) continue;
      for (const int64_t V : {1, 5, 1000, 9000, 17000}) {
        for (int repeat = 0; repeat < (V > 1000 ? 1 : 3); ++repeat) {
          const int64_t N = V > 1000 ? 4 : 1 + seed % 17;
          Sampled round(V > 1000 ? 2 : 5, N, V, tree, V % 4 == 0 ? 4 : 3, seed++);
          SCOPED_TRACE(testing::Message()
                       << "V " << V << " N " << N << " tree " << tree << " drafted " << drafted);
          round.check(drafted);
          for (const int32_t length : round.path_lengths) accepted += length, ++rounds;
        }
      }
    }
  }
  EXPECT_GT(accepted, 3 * rounds / 2);  // drafts were kept
}

// p = q keeps everything; disjoint supports reject the first; q zero throughout rejects and draws from p;
// where [p - q]+ vanishes the draw is from p.
TEST(CudaAcceptSampled, Limits) {
  for (const int64_t V : {6, 400}) {
    Sampled round(4, 4, V, false, 0, 3);
    for (int64_t b = 0; b < 4; ++b) {
      round.lengths[b] = 4;
      for (int64_t n = 0; n < 4; ++n) {
        round.fill(round.p, round.row(b, n));
        round.parents[b * 4 + n] = static_cast<int32_t>(n) - 1;
        for (int64_t i = 0; i < V; ++i) {
          const float x = static_cast<float>(round.p[round.row(b, n) + i]);
          const bool even = i % 2 == 0;
          if (b == 1) round.p.set(round.row(b, n) + i, even ? 1.0f / V : 0.0f);
          round.q.set(round.row(b, n) + i, b == 1 ? (even ? 0.0f : 1.0f / V) : b == 2 ? 0.0f : x);
        }
        if (n > 0) round.tokens[b * 4 + n] = b == 1 ? 1 : round.likely(round.p, round.row(b, n - 1));
      }
      for (int64_t i = 0; i < 4; ++i) round.accept[b * 4 + i] = 0.999999;
    }
    round.accept[3 * 4 + 1] = 1.0;  // out of range on purpose: rejects though p is q
    round.check(true);
    EXPECT_EQ(round.path_lengths, (std::vector<int32_t>{4, 1, 1, 2}));
  }
}

// Uniforms at the ends of [0, 1): a token without weight is never drawn.
TEST(CudaAcceptSampled, EndsOfTheUniform) {
  for (const double u : {0.0, 1.0 - 0x1p-53}) {
    for (const bool drafted : {true, false}) {
      for (unsigned seed = 0; seed < 5; ++seed) {
        Sampled round(3, 2, 501, false, 0, seed);
        for (double& e : round.sample) e = u;
        round.run(drafted);
        for (int64_t b = 0; b < 3; ++b) {
          const int64_t at = round.row(b, round.path_lengths[b] - 1) + round.next_token[b];
          EXPECT_GT(round.p[at], 0.0);
        }
      }
    }
  }
}

TEST(CudaAcceptSampled, NoSumNoToken) {
  for (const float x : {0.0f, kNaN, INFINITY}) {
    for (const bool drafted : {true, false}) {
      Sampled round(2, 3, 50, false, 0, 6);
      for (int64_t n = 0; n < round.lengths[0]; ++n) {
        for (int64_t i = 0; i < 50; ++i)
          round.p.set(round.row(0, n) + i, x), round.q.set(round.row(0, n) + i, 0.0f);
      }
      round.check(drafted);
      EXPECT_EQ(round.next_token[0], -1);
      EXPECT_GE(round.next_token[1], 0);
    }
  }
}

#ifdef SPECDEC_SIMT
TEST(CudaAcceptSampled, ReadsARowOnceAndAPartAgain) {
  Sampled round(2, 3, 32768, false, 4, 2);
  const Report report = round.check(true);
  const double rows = 2.0 * 2 * 32768 * 4;  // p and q of two sequences at most
  EXPECT_LE(static_cast<double>(report.kernel("SampledSums").read.bytes), 1.01 * rows);
  EXPECT_LE(static_cast<double>(report.kernel("SampledDraw").read.bytes), 0.26 * rows);
  EXPECT_LE(report.kernel("SampledSums").read.sectors_per_request(), 4.0);
  EXPECT_LE(report.kernel("SampledDraw").shared.worst, 2);
}

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
  AcceptSampledParams sampled;
  sampled.B = 1, sampled.N = 4, sampled.V = 10;
  sampled.draft = round.draft(), sampled.accepted = round.accepted();
  const float row = 0.0f;
  sampled.p_draft = &row;
  EXPECT_EQ(accept_sampled(sampled, {work.data(), 800}, &session),
            Status::kUnsupported);  // a tree of drawn drafts
  EXPECT_TRUE(session.report.kernels.empty());
}
#endif

}  // namespace
}  // namespace specdec::cuda
