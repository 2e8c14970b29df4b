// A problem of recurrence_problem.h for the kernels of csrc/cuda, which the executor runs with all checks on.
#pragma once

#include "../../csrc/simt/session.h"
#include "recurrence_problem.h"

namespace specdec::test {

// Registers what the arguments point to. The state may be written only where the call has to.
inline void add_inputs(simt::Session& session, const Problem& problem, const StateView& state, bool state_written) {
  const auto add = [&](const char* name, const Tensor& x) {
    if (x.buffer.bytes() > 0) session.memory.add(name, x.buffer.data(), x.buffer.bytes(), simt::Direction::kInput);
  };
  add("q", problem.q);
  add("k", problem.k);
  add("v", problem.v);
  add("g", problem.g);
  add("beta", problem.beta);
  session.memory.add("slots", problem.slots.data(), problem.slots.size(), simt::Direction::kInput);
  const size_t size = state.dtype == DType::kFloat32 ? 4 : 2;
  session.memory.add("state", state.data, static_cast<size_t>(state.slots * state.slot_stride) * size,
                     state_written ? simt::Direction::kBoth : simt::Direction::kInput);
}

inline void add_path(simt::Session& session, const PathView& path, int64_t B) {
  if (path.path != nullptr) {
    session.memory.add("path", path.path, B * path.max_length, simt::Direction::kInput);
  }
  if (path.lengths != nullptr) session.memory.add("path_lengths", path.lengths, B, simt::Direction::kInput);
}

inline void add_factors(simt::Session& session, const Problem& problem, const FactorsView& f) {
  const Shape& s = problem.shape;
  const int64_t nodes = s.B * f.nodes;
  session.memory.add("pending_k", f.k, nodes * s.HK * s.DK, simt::Direction::kInput);
  session.memory.add("pending_u", f.u, nodes * s.HV * s.DV, simt::Direction::kInput);
  if (f.g != nullptr) session.memory.add("pending_g", f.g, nodes * s.HV * problem.decays, simt::Direction::kInput);
}

// Runs verify(p, session) with output pointers set here; fails on findings and on outputs that are not complete.
template <typename Verify>
Outputs run_verify(simt::Session& session, const Problem& problem, VerifyParams p, const Verify& verify) {
  const Shape& s = problem.shape;
  const int64_t rows = p.B * p.N;
  Outputs o{Buffer(s.dtype, rows * s.HV * s.DV), Buffer(DType::kFloat32, rows * s.HK * s.DK),
            Buffer(DType::kFloat32, rows * s.HV * s.DV), Buffer(DType::kFloat32, rows * s.HV * problem.decays)};
  p.out = o.out.data();
  p.k_out = o.k.f32.data();
  p.u_out = o.u.f32.data();
  p.g_out = problem.decays > 0 ? o.g.f32.data() : nullptr;
  session.memory.clear();
  add_inputs(session, problem, p.state, p.has_pending);
  if (p.lengths != nullptr) session.memory.add("lengths", p.lengths, p.B, simt::Direction::kInput);
  if (p.parents != nullptr) session.memory.add("parents", p.parents, rows, simt::Direction::kInput);
  if (p.has_pending) {
    add_factors(session, problem, p.pending);
    add_path(session, p.pending_path, p.B);
  }
  for (const auto& [name, buffer] : {std::pair<const char*, Buffer*>{"out", &o.out}, {"k_out", &o.k}, {"u_out", &o.u}, {"g_out", &o.g}}) {
    if (buffer->bytes() > 0) session.memory.add(name, buffer->data(), buffer->bytes(), simt::Direction::kOutput);
  }
  EXPECT_EQ(verify(p, &session), Status::kOk);
  EXPECT_TRUE(session.report.clean()) << session.report.to_string();
  for (const simt::Buffer& buffer : session.memory.buffers()) {
    if (buffer.direction() != simt::Direction::kOutput) continue;
    EXPECT_EQ(buffer.bytes_with_values(), static_cast<int64_t>(buffer.end() - buffer.begin())) << buffer.name();
  }
  return o;
}

}  // namespace specdec::test
