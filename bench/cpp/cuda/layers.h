// Gated delta rule layers in device memory: as many as it takes to exceed the L2 cache.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../../../csrc/cuda/ops.h"
#include "measure.h"

namespace specdec::bench {

struct Heads {
  const char* name;
  int64_t HK, HV, D;
  DType state;
};
// A Qwen3-Next layer; heads and state of the figures that others publish; the layer of SpecLA's evaluation.
inline constexpr Heads kQwen = {"32x128_f32", 16, 32, 128, DType::kFloat32};
inline constexpr Heads kWide = {"64x128_bf16", 16, 64, 128, DType::kBFloat16};
inline constexpr Heads kSpecLA = {"8x256_f32", 8, 8, 256, DType::kFloat32};

// Tokens are bfloat16, as in a served model; gates, factors and what is computed float32.
class Layers {
 public:
  // `bank` nodes of factors that may be pending.
  Layers(const Heads& heads, int64_t B, int64_t N, int64_t bank);

  int64_t sets() const { return sets_; }

  // The call on one set. `pending` > 0: so many factors of the bank are folded in first.
  VerifyParams verify(int64_t set, Strategy strategy, bool tree, int64_t pending) const;
  CommitParams commit(int64_t set, int64_t factors, CommitMode mode) const;
  PrefillParams prefill(int64_t set) const;
  Status run(const VerifyParams& p, cudaStream_t stream) const;

  // Bytes that cannot be avoided: tokens, state, answers, factors, each once.
  double verify_bytes(int64_t pending) const;
  double commit_bytes(int64_t factors) const;
  double prefill_bytes() const;
  void* state(int64_t set) const { return at(state_, set, state_bytes()); }
  int64_t state_bytes() const { return B * h.HV * h.D * h.D * (h.state == DType::kFloat32 ? 4 : 2); }

  // One call on set 0, its answers poisoned before; the last sequence's are compared with the CPU backend's.
  // Empty, or what is wrong.
  std::string wrong(const VerifyParams& p) const;
  std::string wrong(const CommitParams& p) const;
  std::string wrong(const PrefillParams& p) const;

  const Heads h;
  const int64_t B, N, bank;

 private:
  template <typename T = void>
  static T* at(const gpu::DeviceMemory& memory, int64_t set, int64_t bytes) {
    return reinterpret_cast<T*>(static_cast<char*>(memory.data()) + set * bytes);
  }
  int64_t keys() const { return B * N * h.HK * h.D; }
  int64_t values() const { return B * N * h.HV * h.D; }
  int64_t gates() const { return B * N * h.HV; }
  int64_t token_bytes() const { return 2 * (2 * keys() + values()) + 4 * 2 * gates(); }
  int64_t factor_bytes(int64_t nodes) const { return 4 * B * nodes * (h.HK * h.D + h.HV * h.D + h.HV); }
  FactorsView bank_of(int64_t set) const;
  template <typename Params>
  void fill_tokens(Params& p, int64_t set) const;

  int64_t sets_;
  gpu::DeviceMemory q_, k_, v_, g_, beta_, state_, out_, k_out_, u_out_, g_out_, bank_k_, bank_u_, bank_g_;
  gpu::DeviceMemory parents_, space_, counters_;
};

// `tokens` decode steps of one token, each with the step before pending, on the same layers and by the same
// method.
Time steps(const Heads& heads, int64_t B, int64_t tokens);

// `call` on every set, after `wrong` found nothing.
template <typename Params>
Time checked(const Layers& layers, const Params& first, const Call& call) {
  const std::string fault = layers.wrong(first);
  if (!fault.empty()) return {-1.0, fault};
  return replay(call, layers.sets());
}

}  // namespace specdec::bench
