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
  static constexpr int64_t kMostV = 9000;
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
