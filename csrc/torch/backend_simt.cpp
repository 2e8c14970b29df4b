// The CUDA kernels through the executor as a backend, for tests: on tensors of the CPU, with every access
// checked. What the executor finds is raised as a RuntimeError. For one thread at a time.
#include <stdexcept>

#include "../cuda/ops.h"
#include "backend.h"
#include "cuda_layer.h"
#include "session.h"
#include "simt_memory.h"

namespace specdec::binding {

namespace {

struct Settings {
  uint64_t seed = 0;           // of the next call; every call counts it up
  bool values_checked = true;  // as on a CPU, whose error messages the tests then find here, too
};
Settings settings;

[[noreturn]] void fail(const std::string& text) { throw std::runtime_error("SIMT executor: " + text); }

// launch(session) on a session that knows all memory of the call.
template <typename F>
Status execute(const Operands& operands, NamedTensors outputs, std::initializer_list<Scratch> scratch,
               const F& launch) {
  simt::Options options;
  options.seed = settings.seed++;
  simt::Session session(options);
  const CallMemory memory(session.memory, operands, outputs, scratch);
  const Status status = launch(&session);
  const std::string seed = " (seed " + std::to_string(options.seed) + ")";
  if (!session.report.clean()) {
    std::string text;
    for (const simt::Finding& finding : session.report.findings) text += "\n" + finding.to_string();
    fail("findings" + seed + text);
  }
  if (status != Status::kOk) return status;
  const std::string wrong = memory.written_wrongly();
  if (!wrong.empty()) fail(wrong + seed);
  return status;
}

void check_zeros(const std::vector<int32_t>& counters) {
  for (const int32_t counter : counters) {
    if (counter != 0) fail("a counter was left at " + std::to_string(counter) + ", want zeros");
  }
}

// launch(workspace, session) with the workspace of a verification.
template <typename F>
Status execute_verify(const Operands& operands, NamedTensors outputs, cuda::VerifyWorkspace workspace,
                      const F& launch) {
  std::vector<float> states(static_cast<size_t>(workspace.states_count));
  std::vector<int32_t> counters(static_cast<size_t>(workspace.counters_count));
  workspace.states = states.data();
  workspace.counters = counters.data();
  const Status status =
      execute(operands, outputs,
              {{"states", states.data(), states.size() * sizeof(float), simt::Direction::kOutput},
               {"counters", counters.data(), counters.size() * sizeof(int32_t), simt::Direction::kBoth}},
              [&](simt::Session* session) { return launch(workspace, session); });
  check_zeros(counters);
  return status;
}

// The same of blocks that work on a row together.
template <typename F>
Status execute_teams(const Operands& operands, NamedTensors outputs, cuda::TeamWorkspace workspace,
                     const F& launch) {
  std::vector<uint64_t> values(static_cast<size_t>(workspace.values_count));
  std::vector<int32_t> counters(static_cast<size_t>(workspace.counters_count));
  workspace.values = values.data();
  workspace.counters = counters.data();
  const Status status =
      execute(operands, outputs,
              {{"values", values.data(), values.size() * sizeof(uint64_t), simt::Direction::kOutput},
               {"counters", counters.data(), counters.size() * sizeof(int32_t), simt::Direction::kBoth}},
              [&](simt::Session* session) { return launch(workspace, session); });
  check_zeros(counters);
  return status;
}

struct alignas(16) Line {
  char bytes[16];
};

const Named kNothing[] = {{"", OptionalTensor()}};

}  // namespace

bool values_on_host() { return settings.values_checked; }

bool on_tensor_cores() { return true; }

Device device_of(const Operands&) { return {}; }

Status run(const VerifyParams& p, const Operands& operands, NamedTensors outputs) {
  return execute_verify(operands, outputs, cuda::verify_workspace(p),
                        [&](const cuda::VerifyWorkspace& workspace, simt::Session* session) {
                          return cuda::verify(p, workspace, session);
                        });
}

Status run(const VerifyLayerParams& p, const Operands& operands, NamedTensors outputs) {
  check_layer_kernel(p);
  return execute_verify(operands, outputs, cuda::verify_layer_workspace(p),
                        [&](const cuda::VerifyWorkspace& workspace, simt::Session* session) {
                          return cuda::verify_layer(p, workspace, session);
                        });
}

Status run(const CommitParams& p, const Operands& operands) {
  return execute(operands, kNothing, {}, [&](simt::Session* session) { return cuda::commit(p, session); });
}

Status run(const PrefillParams& p, const Operands& operands, NamedTensors outputs) {
  return execute(operands, outputs, {}, [&](simt::Session* session) { return cuda::prefill(p, session); });
}

Status run(const ConvVerifyParams& p, const Operands& operands, NamedTensors outputs) {
  return execute(operands, outputs, {},
                 [&](simt::Session* session) { return cuda::conv_verify(p, session); });
}

Status run(const ConvCommitParams& p, const Operands& operands) {
  return execute(operands, kNothing, {},
                 [&](simt::Session* session) { return cuda::conv_commit(p, session); });
}

Status run(const AcceptGreedyParams& p, const Operands& operands, NamedTensors outputs) {
  const int64_t bytes = cuda::accept_greedy_workspace_bytes(p);
  std::vector<uint64_t> space(static_cast<size_t>(bytes / 8));
  return execute(
      operands, outputs, {{"space", space.data(), static_cast<size_t>(bytes), simt::Direction::kOutput}},
      [&](simt::Session* session) { return cuda::accept_greedy(p, {space.data(), bytes}, session); });
}

Status run(const TreeAttentionParams& p, const Operands& operands, NamedTensors outputs) {
  const int64_t bytes = cuda::tree_attention_workspace_bytes(p);
  std::vector<Line> space(static_cast<size_t>(bytes / sizeof(Line)));
  return execute(
      operands, outputs, {{"space", space.data(), static_cast<size_t>(bytes), simt::Direction::kOutput}},
      [&](simt::Session* session) { return cuda::tree_attention(p, {space.data(), bytes}, session); });
}

Status run(const AcceptSampledParams& p, const Operands& operands, NamedTensors outputs) {
  return execute_teams(operands, outputs, cuda::accept_sampled_workspace(p),
                       [&](const cuda::TeamWorkspace& workspace, simt::Session* session) {
                         return cuda::accept_sampled(p, workspace, session);
                       });
}

Status run(const SamplingProbsParams& p, const Operands& operands, NamedTensors outputs) {
  return execute_teams(operands, outputs, cuda::sampling_probs_workspace(p),
                       [&](const cuda::TeamWorkspace& workspace, simt::Session* session) {
                         return cuda::sampling_probs(p, workspace, session);
                       });
}

Status run(const DrawParams& p, const Operands& operands, NamedTensors outputs) {
  return execute_teams(operands, outputs, cuda::draw_tokens_workspace(p),
                       [&](const cuda::TeamWorkspace& workspace, simt::Session* session) {
                         return cuda::draw_tokens(p, workspace, session);
                       });
}

}  // namespace specdec::binding

// For the tests, through ctypes.
extern "C" __attribute__((visibility("default"))) void specdec_simt_seed(uint64_t seed) {
  specdec::binding::settings.seed = seed;
}

// Off: nothing looks into the tensors, as on a GPU, where kernels clamp or skip what lies out of range.
extern "C" __attribute__((visibility("default"))) void specdec_simt_check_values(int checked) {
  specdec::binding::settings.values_checked = checked != 0;
}
