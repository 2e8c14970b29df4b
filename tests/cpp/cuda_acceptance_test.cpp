// Greedy and sampled acceptance and sampling of the CUDA backend, executed on the host, or on a GPU in the
// GPU's build.
#include <gtest/gtest.h>

#include <vector>

#include "../../csrc/cuda/ops.h"

#ifdef SPECDEC_SIMT
#include "counts.h"
#include "session.h"
#else
#include "gpu/mirror.h"
#endif

namespace specdec::test {

#ifdef SPECDEC_SIMT

struct TestBackend {
  static constexpr int64_t kMostV = 1000;
  static constexpr int kRepeats = 1;

  static inline simt::Report report;  // of the last call
  static inline uint64_t seed = 3;

  template <typename Regions>
  static Status call(const AcceptGreedyParams& p, const Regions& regions) {
    return run(regions, [&](simt::Session& session) {
      const int64_t bytes = cuda::accept_greedy_workspace_bytes(p);
      std::vector<uint64_t> work(static_cast<size_t>(bytes / 8));
      session.memory.add("workspace", work.data(), work.size(), simt::Direction::kOutput);
      return cuda::accept_greedy(p, {work.data(), bytes}, &session);
    });
  }
  template <typename Regions>
  static Status call(const AcceptSampledParams& p, const Regions& regions) {
    return run_team(regions, cuda::accept_sampled_workspace(p),
                    [&](const cuda::TeamWorkspace& workspace, simt::Session& session) {
                      return cuda::accept_sampled(p, workspace, &session);
                    });
  }
  template <typename Regions>
  static Status call(const SamplingProbsParams& p, const Regions& regions) {
    return run_team(regions, cuda::sampling_probs_workspace(p),
                    [&](const cuda::TeamWorkspace& workspace, simt::Session& session) {
                      return cuda::sampling_probs(p, workspace, &session);
                    });
  }
  template <typename Regions>
  static Status call(const DrawParams& p, const Regions& regions) {
    return run_team(regions, cuda::draw_tokens_workspace(p),
                    [&](const cuda::TeamWorkspace& workspace, simt::Session& session) {
                      return cuda::draw_tokens(p, workspace, &session);
                    });
  }

 private:
  template <typename Regions, typename F>
  static Status run_team(const Regions& regions, cuda::TeamWorkspace workspace, const F& launch) {
    std::vector<uint64_t> values(static_cast<size_t>(workspace.values_count));
    std::vector<int32_t> counters(static_cast<size_t>(workspace.counters_count));
    workspace.values = values.data(), workspace.counters = counters.data();
    const Status status = run(regions, [&](simt::Session& session) {
      session.memory.add("values", values.data(), values.size(), simt::Direction::kOutput);
      session.memory.add("counters", counters.data(), counters.size(), simt::Direction::kBoth);
      return launch(workspace, session);
    });
    EXPECT_EQ(counters, std::vector<int32_t>(counters.size()));
    return status;
  }

  template <typename Regions, typename F>
  static Status run(const Regions& regions, const F& launch) {
    simt::Session session({seed++});
    for (const auto& region : regions) {
      const auto direction = region.output ? simt::Direction::kOutput : simt::Direction::kInput;
      simt::Buffer& buffer = session.memory.add(region.name, region.data, region.bytes, direction);
      if (region.values.empty()) continue;
      buffer.clear_values(buffer.begin(), region.bytes);
      for (const auto& [offset, size] : region.values) buffer.set_values(buffer.begin() + offset, size);
    }
    const Status status = launch(session);
    EXPECT_TRUE(session.report.clean())
        << (session.report.findings.empty() ? "" : session.report.findings[0].to_string());
    report = session.report;
    return status;
  }
};

#else

struct TestBackend {
  static constexpr int64_t kMostV = INT64_MAX;
  static constexpr int kRepeats = 4;

  template <typename Params, typename Regions>
  static Status call(const Params& p, const Regions&) {
    return gpu::call(p);
  }
};

#endif

}  // namespace specdec::test

#include "acceptance_suite.h"

#ifdef SPECDEC_SIMT

#include "../../csrc/cpu/ops.h"

namespace specdec::test {
namespace {

AcceptSampledParams params_of(Round& round) {
  AcceptSampledParams p;
  Regions unused;
  round.fill_params(p, unused);
  p.draft_probs = round.draft_probs.data(), p.draft_rows = round.draft_rows.data();
  p.R = round.R, p.draft_stride = round.V + round.gap;
  p.rules = round.rules.data();
  p.sampling = {round.temperature.data(), round.top_k.data(), round.top_p.data(), round.min_p.data()};
  p.seeds = round.seeds.data(), p.positions = round.positions.data();
  return p;
}

// Several blocks a row, rows that are whole vectors and others, and what the CPU backend decides.
TEST(CudaAcceptSampled, LongRowsAsTheCpuBackend) {
  unsigned seed = 1;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t V : {24576, 17011}) {
      Round round(6, 4, V, seed % 2 == 0, dtype, 3 * seed + (V % 8 == 0 ? 0 : 1));
      round.check_sampled();
      const auto path = round.path, path_lengths = round.path_lengths;
      const auto next_token = round.next_token;
      const AcceptSampledParams p = params_of(round);
      ASSERT_EQ(cpu::accept_sampled(p), Status::kOk);
      EXPECT_EQ(path, round.path) << V;
      EXPECT_EQ(path_lengths, round.path_lengths) << V;
      EXPECT_EQ(next_token, round.next_token) << V;
      ++seed;
    }
  }
}

TEST(CudaSamplingProbs, LongRowsAsTheCpuBackend) {
  for (const int64_t V : {24576, 17011}) {
    std::mt19937 rng(static_cast<unsigned>(V));
    std::vector<float> logits(4 * V), probs(4 * V), want(4 * V);
    for (float& x : logits) x = std::round(16.0f * std::normal_distribution<float>()(rng)) / 8.0f;
    logits[3 * V + 77] = kNaN;
    const std::vector<float> temperature{1.0f, 0.6f, 0.0f, 1.0f}, top_p{1.0f, 0.9f, 1.0f, 1.0f}, min_p(4);
    const std::vector<int32_t> top_k{100, 0, 0, 0};
    SamplingProbsParams p;
    p.R = 4, p.V = V, p.logits = logits.data(), p.stride = V, p.probs = probs.data();
    p.sampling = {temperature.data(), top_k.data(), top_p.data(), min_p.data()};
    Regions regions;
    add_region(regions, "logits", logits);
    add_region(regions, "temperature", temperature);
    add_region(regions, "top_k", top_k);
    add_region(regions, "top_p", top_p);
    add_region(regions, "min_p", min_p);
    add_region(regions, "probs", probs, true);
    ASSERT_EQ(TestBackend::call(p, regions), Status::kOk);
    p.probs = want.data();
    ASSERT_EQ(cpu::sampling_probs(p), Status::kOk);
    EXPECT_TRUE(std::equal(probs.begin(), probs.begin() + 3 * V, want.begin()));
    EXPECT_TRUE(std::all_of(probs.begin() + 3 * V, probs.end(), [](float x) { return std::isnan(x); }));
  }
}

// The order of blocks, warps and lanes changes nothing.
TEST(CudaAcceptSampled, AnyOrder) {
  Round round(6, 6, 9000, true, DType::kBFloat16, 8);
  std::vector<int64_t> first;
  for (int i = 0; i < 4; ++i) {
    round.check_sampled();
    if (i == 0) first = round.next_token;
    EXPECT_EQ(round.next_token, first);
  }
}

TEST(CudaAcceptSampled, OneNode) {
  for (const int64_t V : {1, 300}) {
    Round round(7, 1, V, false, DType::kFloat32, 4);
    round.check_sampled();
  }
}

// Values that nobody checks before a launch end in some path, not beyond the buffers.
TEST(CudaAcceptSampled, WildValues) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    Round round(8, 1 + seed % 9, seed % 2 == 0 ? 40 : 700, true, DType::kFloat32, seed);
    const AcceptSampledParams p = params_of(round);
    Regions regions;
    AcceptSampledParams unused;
    round.fill_params(unused, regions);
    regions[0].values.clear();
    add_region(regions, "draft_probs", round.draft_probs);
    add_region(regions, "draft_rows", round.draft_rows);
    add_region(regions, "rules", round.rules);
    add_region(regions, "temperature", round.temperature);
    add_region(regions, "top_k", round.top_k);
    add_region(regions, "top_p", round.top_p);
    add_region(regions, "min_p", round.min_p);
    add_region(regions, "seeds", round.seeds);
    add_region(regions, "positions", round.positions);
    const auto wild = [&](auto& values, auto low, auto high) {
      for (auto& x : values) {
        if (round.below(3) == 0) {
          x = static_cast<std::decay_t<decltype(x)>>(low + round.below(high - low));
        } else if (round.below(5) == 0) {
          x = static_cast<std::decay_t<decltype(x)>>(round.below(2) == 0 ? INT32_MIN : INT32_MAX);
        }
      }
    };
    wild(round.tokens, int64_t{-3}, round.V + 3);
    wild(round.parents, int64_t{-2}, round.N + 2);
    wild(round.lengths, int64_t{-2}, round.N + 2);
    wild(round.draft_rows, int64_t{-2}, round.R + 2);
    wild(round.rules, int64_t{-1}, int64_t{7});
    wild(round.top_k, int64_t{-5}, int64_t{900});
    wild(round.positions, int64_t{-5}, int64_t{5});
    for (auto* settings : {&round.temperature, &round.top_p, &round.min_p}) {
      for (float& x : *settings) {
        const float other[] = {kNaN, INFINITY, -1.0f, 1e-44f, 1e30f};
        if (round.below(3) == 0) x = other[round.below(5)];
      }
    }
    for (float& x : round.draft_probs) {
      if (round.below(40) == 0) x = round.below(2) == 0 ? kNaN : INFINITY;
    }
    for (int64_t i = 0; i < round.B * round.N * (round.V + round.gap); ++i) {
      if (std::isnan(round.logits[i])) round.logits.set(i, 0.5f);
    }
    ASSERT_EQ(TestBackend::call(p, regions), Status::kOk);
    for (int64_t b = 0; b < round.B; ++b) {
      EXPECT_LE(round.path_lengths[b], round.N);
      EXPECT_LT(round.next_token[b], round.V);
      EXPECT_GE(round.next_token[b], -1);
      for (int64_t i = 0; i < round.P; ++i) {
        EXPECT_GE(round.path[b * round.P + i], 0);
        EXPECT_LT(round.path[b * round.P + i], round.N);
      }
    }
  }
}

// Memory delivers the rows that the walk comes to once, and no other; each is passed over for its maximum and
// its sum, and a part of the last one twice for the draw.
TEST(CudaAcceptSampled, ReadsTheRowsOfTheWalk) {
  constexpr int64_t V = 32768;
  Round round(2, 5, V, false, DType::kBFloat16, 3);
  for (int64_t b = 0; b < 2; ++b) {
    round.rules[b] = 0, round.lengths[b] = 5, round.set(b, {});
    for (int64_t n = 0; n < 5; ++n) round.parents[b * 5 + n] = static_cast<int32_t>(n) - 1, round.fill(b, n);
  }
  round.check_sampled(false);
  round.tokens[1] = round.next_token[0];  // so that one walk goes on
  round.check_sampled(false);
  const simt::KernelCounts& counts = TestBackend::report.kernel("AcceptSampled");
  const double rows = static_cast<double>((round.path_lengths[0] + round.path_lengths[1]) * V * 2);
  ASSERT_GE(round.path_lengths[0], 2);
  EXPECT_EQ(buffer(counts, "logits").footprint_read, static_cast<int64_t>(rows));
  EXPECT_LE(static_cast<double>(buffer(counts, "logits").bytes_read), 2.26 * rows);
  EXPECT_LE(static_cast<double>(counts.read.bytes), 2.4 * rows);
  EXPECT_LE(counts.read.sectors_per_request(), 4.0);
  EXPECT_LE(counts.shared.worst, 2);
}

TEST(CudaAcceptance, RefusesWhatItCannotRun) {
  simt::Session session;
  Round round(1, 4, 10, true, DType::kFloat32, 1);
  AcceptGreedyParams greedy;
  Regions regions;
  round.fill_params(greedy, regions);
  EXPECT_EQ(cuda::accept_greedy(greedy, {}, &session), Status::kInvalidArgument);  // no workspace
  std::vector<uint64_t> work(100);
  greedy.accepted.max_length = 3;
  EXPECT_EQ(cuda::accept_greedy(greedy, {work.data(), 800}, &session), Status::kInvalidArgument);
  AcceptSampledParams sampled = params_of(round);
  EXPECT_EQ(cuda::accept_sampled(sampled, {}, &session), Status::kInvalidArgument);
  sampled.N = sampled.accepted.max_length = 513;
  EXPECT_EQ(cuda::accept_sampled(sampled, {work.data(), nullptr, 100, 0}, &session), Status::kUnsupported);
  SamplingProbsParams probs;
  probs.R = 1, probs.V = (int64_t{1} << 21) + 1;
  EXPECT_EQ(cuda::sampling_probs(probs, cuda::sampling_probs_workspace(probs), &session),
            Status::kUnsupported);
  EXPECT_TRUE(session.report.kernels.empty());
}

}  // namespace
}  // namespace specdec::test

#endif
