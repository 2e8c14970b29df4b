// The problems of recurrence_problem.h on the CUDA backend: through the executor, which must find nothing,
// or, in the GPU's build, on a GPU.
#pragma once

#ifndef SPECDEC_SIMT

#include "gpu/mirror.h"
#include "recurrence_problem.h"

namespace specdec::test {

class CudaProblem : public Problem {
 public:
  using Problem::Problem;

  Status call(const VerifyParams& p) const override { return gpu::call(p); }
  Status call(const CommitParams& p) const override { return gpu::call(p); }
  Status call(const PrefillParams& p) const override { return gpu::call(p); }
};

}  // namespace specdec::test

#else

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../../csrc/cuda/ops.h"
#include "counts.h"
#include "recurrence_problem.h"
#include "session.h"

namespace specdec::test {

// No access to shared memory takes more than two passes; those of `state_file` to global memory, of which
// there are some, are coalesced.
inline void expect_coalesced(const simt::KernelCounts& counts, const std::string& state_file) {
  bool seen = false;
  for (const simt::LineCounts& line : counts.lines) {
    SCOPED_TRACE(line.file + ":" + std::to_string(line.line));
    EXPECT_LE(line.shared.worst, 2);
    if (line.file.find(state_file) == std::string::npos) continue;
    seen = seen || line.read.requests + line.write.requests > 0;
    EXPECT_LE(line.read.sectors_per_request(), 4.0);
    EXPECT_LE(line.write.sectors_per_request(), 4.0);
  }
  EXPECT_TRUE(seen) << counts.kernel;
}

class CudaProblem : public Problem {
 public:
  using Problem::Problem;

  // Where set, starts a kernel in the place of cuda::verify.
  std::function<Status(const VerifyParams&, simt::Session*)> launcher;

  // The last call's.
  const simt::Session& last() const { return *session_; }

  Status call(const VerifyParams& p) const override {
    simt::Session& session = start();
    register_call(session, p);
    cuda::VerifyWorkspace workspace = cuda::verify_workspace(p);
    std::vector<float> states(workspace.states_count);
    std::vector<int32_t> counters(workspace.counters_count);
    workspace.states = states.data();
    workspace.counters = counters.data();
    if (!states.empty()) session.memory.add("states", states.data(), states.size(), simt::Direction::kOutput);
    if (!counters.empty()) {
      session.memory.add("counters", counters.data(), counters.size(), simt::Direction::kBoth);
    }
    const Status status = launcher ? launcher(p, &session) : cuda::verify(p, workspace, &session);
    for (const int32_t counter : counters) EXPECT_EQ(counter, 0) << "a counter was left behind";
    finish(session);
    if (status == Status::kOk) expect_complete(session, {"out", "k_out", "u_out", "g_out"});
    return status;
  }

  Status call(const CommitParams& p) const override {
    simt::Session& session = start();
    register_call(session, p);
    const Status status = cuda::commit(p, &session);
    finish(session);
    return status;
  }

  Status call(const PrefillParams& p) const override {
    simt::Session& session = start();
    register_call(session, p);
    const Status status = cuda::prefill(p, &session);
    finish(session);
    if (status == Status::kOk) expect_complete(session, {"out"});
    return status;
  }

  // Everything that the call may read or write, by name.
  void register_call(simt::Session& session, const VerifyParams& p) const {
    add_tokens(session);
    const int64_t rows = p.B * p.N, size = shape.dtype == DType::kFloat32 ? 4 : 2;
    add_state(session, p.state, p.has_pending);
    add_input(session, "slots", p.slots, p.B * 4);
    add_input(session, "parents", p.parents, rows * 4);
    add_input(session, "lengths", p.lengths, p.B * 4);
    if (p.has_pending) {
      add_factors(session, "pending", p.pending);
      add_path(session, p.pending_path, p.B);
    }
    if (p.has_prefix) {
      add_factors(session, "prefix", p.prefix);
      add_input(session, "prefix_parents", p.prefix_parents, p.B * p.prefix.nodes * 4);
    }
    add_output(session, "out", p.out, rows * shape.HV * shape.DV * size);
    add_output(session, "k_out", p.k_out, rows * shape.HK * shape.DK * 4);
    add_output(session, "u_out", p.u_out, rows * shape.HV * shape.DV * 4);
    add_output(session, "g_out", p.g_out, rows * shape.HV * decays * 4);
  }

  void register_call(simt::Session& session, const PrefillParams& p) const {
    add_tokens(session);
    const int64_t rows = p.cu_seqlens != nullptr ? 1 : p.B, size = shape.dtype == DType::kFloat32 ? 4 : 2;
    add_state(session, p.state, true);
    add_input(session, "slots", p.slots, p.B * 4);
    add_input(session, "lengths", p.lengths, p.B * 4);
    add_input(session, "cu_seqlens", p.cu_seqlens, (p.B + 1) * 4);
    add_output(session, "out", p.out, rows * p.T * shape.HV * shape.DV * size);
  }

  void register_call(simt::Session& session, const CommitParams& p) const {
    add_state(session, p.state, true);
    add_input(session, "slots", p.slots, p.B * 4);
    add_factors(session, "factors", p.factors);
    add_path(session, p.path, p.B);
  }

 private:
  simt::Session& start() const {
    simt::Options options;
    options.seed = ++calls_;
    session_ = std::make_unique<simt::Session>(options);
    return *session_;
  }
  static void finish(const simt::Session& session) {
    ASSERT_TRUE(session.report.clean()) << session.report.to_string();
  }
  static void expect_complete(const simt::Session& session, std::initializer_list<const char*> names) {
    for (const char* name : names) {
      for (const auto& buffer : session.memory.buffers()) {
        if (buffer.name() != name) continue;
        EXPECT_EQ(buffer.bytes_with_values(), static_cast<int64_t>(buffer.end() - buffer.begin())) << name;
      }
    }
  }
  void add_tokens(simt::Session& session) const {
    const auto tensor = [&](const char* name, const Tensor& t) {
      add_input(session, name, t.buffer.data(), t.buffer.bytes());
    };
    tensor("q", q), tensor("k", k), tensor("v", v), tensor("g", g), tensor("beta", beta);
  }

  static void add_input(simt::Session& session, const std::string& name, const void* data, int64_t bytes) {
    if (data == nullptr || bytes <= 0) return;
    if (session.memory.find(reinterpret_cast<uintptr_t>(data)) != nullptr)
      return;  // one array, two arguments
    session.memory.add(name, data, static_cast<size_t>(bytes), simt::Direction::kInput);
  }
  static void add_output(simt::Session& session, const char* name, const void* data, int64_t bytes) {
    if (bytes > 0) session.memory.add(name, data, static_cast<size_t>(bytes), simt::Direction::kOutput);
  }
  void add_state(simt::Session& session, const StateView& view, bool written) const {
    const int64_t bytes = pool * slot_stride * (shape.state == DType::kFloat32 ? 4 : 2);
    session.memory.add("state", view.data, static_cast<size_t>(bytes),
                       written ? simt::Direction::kBoth : simt::Direction::kInput);
  }
  void add_factors(simt::Session& session, const std::string& name, const FactorsView& view) const {
    const int64_t nodes = shape.B * view.nodes;
    add_input(session, name + ".k", view.k, nodes * shape.HK * shape.DK * 4);
    add_input(session, name + ".u", view.u, nodes * shape.HV * shape.DV * 4);
    add_input(session, name + ".g", view.g, nodes * shape.HV * decays * 4);
  }
  static void add_path(simt::Session& session, const PathView& view, int64_t B) {
    add_input(session, "path", view.path, B * view.max_length * 4);
    add_input(session, "path_lengths", view.lengths, B * 4);
  }

  mutable uint64_t calls_ = 0;
  mutable std::unique_ptr<simt::Session> session_;
};

}  // namespace specdec::test

#endif
