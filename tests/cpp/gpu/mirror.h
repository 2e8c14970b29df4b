// Calls of the CUDA backend with the host's arrays: copied to the GPU, each into an allocation of its own so
// that a memory checker sees every step beyond, and copied back.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "../../../csrc/cuda/ops.h"
#include "device.h"

namespace specdec::gpu {

inline int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// The arrays of one call.
class Mirror {
 public:
  // p's address becomes that of a copy; its alignment to 16 bytes stays what it was.
  template <typename T>
  void in(const T*& p, int64_t bytes) {
    p = static_cast<const T*>(copy(p, bytes, false));
  }
  // Copied back by `finish`. What the call does not write keeps what the host had there.
  template <typename T>
  void inout(T*& p, int64_t bytes) {
    p = static_cast<T*>(const_cast<void*>(copy(p, bytes, true)));
  }
  void* scratch(int64_t bytes, int fill) {
    copies_.push_back({DeviceMemory(static_cast<size_t>(bytes)), 0, nullptr, 0});
    void* data = copies_.back().memory.data();
    if (bytes > 0) check(cudaMemset(data, fill, static_cast<size_t>(bytes)), "cudaMemset");
    return data;
  }
  void finish() {
    check(cudaDeviceSynchronize(), "the call");
    for (const Copy& c : copies_) {
      if (c.host != nullptr) {
        check(cudaMemcpy(c.host, static_cast<char*>(c.memory.data()) + c.offset, c.bytes,
                         cudaMemcpyDeviceToHost),
              "cudaMemcpy");
      }
    }
  }

 private:
  struct Copy {
    DeviceMemory memory;
    size_t offset;
    void* host;  // null: nothing is copied back
    size_t bytes;
  };

  const void* copy(const void* host, int64_t count, bool back) {
    if (host == nullptr || count <= 0) return host;
    const size_t bytes = static_cast<size_t>(count), offset = reinterpret_cast<uintptr_t>(host) % 16;
    copies_.push_back(
        {DeviceMemory(offset + bytes), offset, back ? const_cast<void*>(host) : nullptr, bytes});
    char* data = static_cast<char*>(copies_.back().memory.data()) + offset;
    check(cudaMemcpy(data, host, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    return data;
  }

  std::vector<Copy> copies_;
};

// Elements from the first to the last of a [B, N, H, D] tensor.
inline int64_t extent(int64_t B, int64_t N, int64_t H, int64_t D, const Strides& s) {
  return B * N * H * D == 0 ? 0 : (B - 1) * s.b + (N - 1) * s.n + (H - 1) * s.h + D;
}

// Gates a value head.
inline int64_t decays(const Recurrence& r) {
  return r.gate == Gate::kNone ? 0 : r.gate == Gate::kHead ? 1 : r.DK;
}

template <typename Params>
void mirror_tokens(Mirror& m, Params& p, int64_t B, int64_t N) {
  const Recurrence& r = p.rec;
  const int64_t size = size_of(p.dtype);
  m.in(p.q, extent(B, N, r.HK, r.DK, p.q_stride) * size);
  m.in(p.k, extent(B, N, r.HK, r.DK, p.k_stride) * size);
  m.in(p.v, extent(B, N, r.HV, r.DV, p.v_stride) * size);
  m.in(p.g, extent(B, N, r.HV, decays(r), p.g_stride) * 4);
  m.in(p.beta, extent(B, N, r.HV, 1, p.beta_stride) * 4);
  m.in(p.slots, p.B * 4);
  m.in(p.lengths, p.B * 4);
}

// Slots of `slot` elements each.
template <typename View>
void mirror_state(Mirror& m, View& state, int64_t slot) {
  if (state.slots > 0)
    m.inout(state.data, ((state.slots - 1) * state.slot_stride + slot) * size_of(state.dtype));
}

inline void mirror_factors(Mirror& m, FactorsView& f, const Recurrence& r, int64_t B) {
  m.in(f.k, B * f.nodes * r.HK * r.DK * 4);
  m.in(f.u, B * f.nodes * r.HV * r.DV * 4);
  m.in(f.g, B * f.nodes * r.HV * decays(r) * 4);
}

inline void mirror_path(Mirror& m, PathView& path, int64_t B) {
  m.in(path.path, B * path.max_length * 4);
  m.in(path.lengths, B * 4);
}

// All that a verification reads and writes but for a workspace.
inline void mirror_verify(Mirror& m, VerifyParams& p) {
  const Recurrence r = p.rec;
  mirror_tokens(m, p, p.B, p.N);
  mirror_state(m, p.state, r.HV * r.DV * r.DK);
  m.in(p.parents, p.B * p.N * 4);
  if (p.has_pending) {
    mirror_factors(m, p.pending, r, p.B);
    mirror_path(m, p.pending_path, p.B);
  }
  if (p.has_prefix) {
    mirror_factors(m, p.prefix, r, p.B);
    m.in(p.prefix_parents, p.B * p.prefix.nodes * 4);
  }
  const int64_t rows = p.B * p.N;
  m.inout(p.out, rows * r.HV * r.DV * size_of(p.dtype));
  m.inout(p.k_out, rows * r.HK * r.DK * 4);
  m.inout(p.u_out, rows * r.HV * r.DV * 4);
  m.inout(p.g_out, rows * r.HV * decays(r) * 4);
}

// launch(space) with the workspace of a verification, whose arrays are mirrored.
template <typename F>
Status launch_verify(Mirror& m, cuda::VerifyWorkspace space, F&& launch) {
  std::vector<int32_t> counters(static_cast<size_t>(space.counters_count), 0);
  space.states = static_cast<float*>(m.scratch(space.states_count * 4, 0xff));
  space.counters = counters.data();
  m.inout(space.counters, space.counters_count * 4);
  const Status status = launch(space);
  m.finish();
  for (const int32_t counter : counters) EXPECT_EQ(counter, 0) << "a counter was left behind";
  return status;
}

inline Status call(VerifyParams p) {
  Mirror m;
  mirror_verify(m, p);
  return launch_verify(m, cuda::verify_workspace(p),
                       [&](const cuda::VerifyWorkspace& space) { return cuda::verify(p, space, nullptr); });
}

inline Status call(CommitParams p) {
  Mirror m;
  mirror_state(m, p.state, p.rec.HV * p.rec.DV * p.rec.DK);
  mirror_factors(m, p.factors, p.rec, p.B);
  mirror_path(m, p.path, p.B);
  m.in(p.slots, p.B * 4);
  const Status status = cuda::commit(p, nullptr);
  m.finish();
  return status;
}

inline Status call(PrefillParams p) {
  Mirror m;
  const int64_t rows = p.cu_seqlens != nullptr ? 1 : p.B;
  mirror_tokens(m, p, rows, p.T);
  mirror_state(m, p.state, p.rec.HV * p.rec.DV * p.rec.DK);
  m.in(p.cu_seqlens, (p.B + 1) * 4);
  m.inout(p.out, rows * p.T * p.rec.HV * p.rec.DV * size_of(p.dtype));
  const Status status = cuda::prefill(p, nullptr);
  m.finish();
  return status;
}

inline void mirror_inputs(Mirror& m, ConvInputView& x, int64_t B, int64_t C) {
  if (B * x.nodes > 0) m.in(x.x, ((B - 1) * x.stride_b + (x.nodes - 1) * x.stride_n + C) * size_of(x.dtype));
}

inline Status call(VerifyLayerParams p) {
  Mirror m;
  VerifyParams& v = p.verify;
  mirror_verify(m, v);
  if (p.has_prologue) {
    LayerPrologue& from = p.prologue;
    const int64_t C = LayerChannels(v.rec, 0, 0).count;
    mirror_inputs(m, from.mixed, v.B, C);
    m.in(from.weight, C * from.W * 4);
    m.in(from.bias, C * 4);
    mirror_state(m, from.window, (from.W - 1) * C);
    if (v.has_pending) mirror_inputs(m, from.pending, v.B, C);
    if (v.has_prefix) mirror_inputs(m, from.prefix, v.B, C);
    m.in(from.a, extent(v.B, v.N, 1, v.rec.HV, from.a_stride) * size_of(v.dtype));
    m.in(from.b, extent(v.B, v.N, 1, v.rec.HV, from.b_stride) * size_of(v.dtype));
    m.in(from.A_log, v.rec.HV * 4);
    m.in(from.dt_bias, v.rec.HV * 4);
  }
  if (p.has_epilogue) {
    m.in(p.epilogue.weight, v.rec.DV * 4);
    m.in(p.epilogue.gate, extent(v.B, v.N, v.rec.HV, v.rec.DV, p.epilogue.gate_stride) * size_of(v.dtype));
  }
  return launch_verify(m, cuda::verify_layer_workspace(p), [&](const cuda::VerifyWorkspace& space) {
    return cuda::verify_layer(p, space, nullptr);
  });
}

inline Status call(ConvVerifyParams p) {
  Mirror m;
  mirror_inputs(m, p.x, p.B, p.C);
  mirror_state(m, p.state, (p.W - 1) * p.C);
  m.in(p.weight, p.C * p.W * 4);
  m.in(p.bias, p.C * 4);
  m.in(p.slots, p.B * 4);
  m.in(p.parents, p.B * p.N * 4);
  m.in(p.lengths, p.B * 4);
  if (p.has_pending) {
    mirror_inputs(m, p.pending, p.B, p.C);
    mirror_path(m, p.pending_path, p.B);
  }
  if (p.has_prefix) {
    mirror_inputs(m, p.prefix, p.B, p.C);
    m.in(p.prefix_parents, p.B * p.prefix.nodes * 4);
  }
  m.inout(p.y, p.B * p.N * p.C * size_of(p.x.dtype));
  const Status status = cuda::conv_verify(p, nullptr);
  m.finish();
  return status;
}

inline Status call(ConvCommitParams p) {
  Mirror m;
  mirror_inputs(m, p.x, p.B, p.C);
  mirror_path(m, p.path, p.B);
  mirror_state(m, p.state, (p.W - 1) * p.C);
  m.in(p.slots, p.B * 4);
  const Status status = cuda::conv_commit(p, nullptr);
  m.finish();
  return status;
}

// Elements from the first to the last of keys or values [S, HK, Tmax, D].
inline int64_t cache_extent(const TreeAttentionParams& p, const Strides& s) {
  return extent(p.cache.slots, p.cache.room, p.HK, p.D, s);
}

inline Status call(TreeAttentionParams p) {
  Mirror m;
  const int64_t size = size_of(p.dtype), NP = p.prefix.nodes;
  m.in(p.q, extent(p.B, p.N, p.HQ, p.D, p.q_stride) * size);
  m.in(p.nodes.k, extent(p.B, p.N, p.HK, p.D, p.nodes.k_stride) * size);
  m.in(p.nodes.v, extent(p.B, p.N, p.HK, p.D, p.nodes.v_stride) * size);
  m.in(p.prefix.k, extent(p.B, NP, p.HK, p.D, p.prefix.k_stride) * size);
  m.in(p.prefix.v, extent(p.B, NP, p.HK, p.D, p.prefix.v_stride) * size);
  m.in(p.cache.k, cache_extent(p, p.cache.k_stride) * size);
  m.in(p.cache.v, cache_extent(p, p.cache.v_stride) * size);
  m.in(p.cache.lengths, p.cache.slots * 4);
  m.in(p.slots, p.B * 4);
  m.in(p.parents, p.B * p.N * 4);
  m.in(p.lengths, p.B * 4);
  m.in(p.prefix_parents, p.B * NP * 4);
  m.inout(p.out, p.B * p.N * p.HQ * p.D * size);
  const int64_t bytes = cuda::tree_attention_workspace_bytes(p);
  const Status status = cuda::tree_attention(p, {m.scratch(bytes, 0xff), bytes}, nullptr);
  m.finish();
  return status;
}

inline void mirror_round(Mirror& m, DraftView& draft, AcceptedView& accepted, int64_t B, int64_t N) {
  m.in(draft.tokens, B * N * 8);
  m.in(draft.parents, B * N * 4);
  m.in(draft.lengths, B * 4);
  m.inout(accepted.path, B * accepted.max_length * 4);
  m.inout(accepted.path_lengths, B * 4);
  m.inout(accepted.next_token, B * 8);
}

inline Status call(AcceptGreedyParams p) {
  Mirror m;
  m.in(p.logits, extent(p.B, p.N, 1, p.V, {p.stride_b, p.stride_n, 0}) * size_of(p.dtype));
  mirror_round(m, p.draft, p.accepted, p.B, p.N);
  const int64_t bytes = cuda::accept_greedy_workspace_bytes(p);
  const Status status = cuda::accept_greedy(p, {m.scratch(bytes, 0xff), bytes}, nullptr);
  m.finish();
  return status;
}

inline void mirror_sampling(Mirror& m, SamplingView& view, int64_t rows) {
  m.in(view.temperature, rows * 4);
  m.in(view.top_k, rows * 4);
  m.in(view.top_p, rows * 4);
  m.in(view.min_p, rows * 4);
}

// launch(space) with the workspace of blocks that work on a row together.
template <typename F>
Status launch_teams(Mirror& m, cuda::TeamWorkspace space, F&& launch) {
  std::vector<int32_t> counters(static_cast<size_t>(space.counters_count), 0);
  space.values = static_cast<uint64_t*>(m.scratch(space.values_count * 8, 0xff));
  space.counters = counters.data();
  m.inout(space.counters, space.counters_count * 4);
  const Status status = launch(space);
  m.finish();
  for (const int32_t counter : counters) EXPECT_EQ(counter, 0) << "a counter was left behind";
  return status;
}

inline Status call(AcceptSampledParams p) {
  Mirror m;
  m.in(p.logits, extent(p.B, p.N, 1, p.V, {p.stride_b, p.stride_n, 0}) * size_of(p.dtype));
  m.in(p.draft_probs, extent(1, p.R, 1, p.V, {0, p.draft_stride, 0}) * 4);
  m.in(p.draft_rows, p.B * p.N * 4);
  m.in(p.rules, p.B * 4);
  mirror_sampling(m, p.sampling, p.B);
  m.in(p.seeds, p.B * 8);
  m.in(p.positions, p.B * 8);
  mirror_round(m, p.draft, p.accepted, p.B, p.N);
  return launch_teams(m, cuda::accept_sampled_workspace(p), [&](const cuda::TeamWorkspace& space) {
    return cuda::accept_sampled(p, space, nullptr);
  });
}

inline Status call(SamplingProbsParams p) {
  Mirror m;
  m.in(p.logits, extent(1, p.R, 1, p.V, {0, p.stride, 0}) * size_of(p.dtype));
  mirror_sampling(m, p.sampling, p.R);
  m.inout(p.probs, p.R * p.V * 4);
  return launch_teams(m, cuda::sampling_probs_workspace(p), [&](const cuda::TeamWorkspace& space) {
    return cuda::sampling_probs(p, space, nullptr);
  });
}

inline Status call(DrawParams p) {
  Mirror m;
  m.in(p.probs, extent(1, p.R, 1, p.V, {0, p.stride, 0}) * 4);
  m.in(p.seeds, p.R * 8);
  m.in(p.positions, p.R * 8);
  m.in(p.nodes, p.R * 4);
  m.inout(p.tokens, p.R * p.K * 8);
  return launch_teams(m, cuda::draw_tokens_workspace(p),
                      [&](const cuda::TeamWorkspace& space) { return cuda::draw_tokens(p, space, nullptr); });
}

}  // namespace specdec::gpu
