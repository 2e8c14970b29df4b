// Chooses the instruction set once, at the first call.
#include <cstdlib>
#include <cstring>

#include "ops.h"

namespace specdec::cpu {

namespace {

enum class Isa { kPortable, kAvx2, kAvx512 };

Isa widest() {
#ifdef SPECDEC_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return Isa::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    return Isa::kAvx2;
  }
#endif
  return Isa::kPortable;
}

Isa choose() {
  const Isa have = widest();
  const char* asked = std::getenv("SPECDEC_CPU_ISA");
  if (asked == nullptr) return have;
  if (std::strcmp(asked, "portable") == 0) return Isa::kPortable;
  if (std::strcmp(asked, "avx2") == 0 && have != Isa::kPortable) return Isa::kAvx2;
  return have;
}

Isa current() {
  static const Isa isa = choose();
  return isa;
}

}  // namespace

const char* isa_name() {
  switch (current()) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kPortable:
      break;
  }
  return "portable";
}

const char* isa_builds() {
#ifdef SPECDEC_X86
  return "portable,avx2,avx512";
#else
  return "portable";
#endif
}

#ifdef SPECDEC_X86
#define SPECDEC_CPU_OP(op, Params) \
  namespace avx512 {               \
  Status op(const Params& p);      \
  }                                \
  namespace avx2 {                 \
  Status op(const Params& p);      \
  }                                \
  namespace portable {             \
  Status op(const Params& p);      \
  }                                \
  Status op(const Params& p) {     \
    switch (current()) {           \
      case Isa::kAvx512:           \
        return avx512::op(p);      \
      case Isa::kAvx2:             \
        return avx2::op(p);        \
      case Isa::kPortable:         \
        break;                     \
    }                              \
    return portable::op(p);        \
  }
#else
#define SPECDEC_CPU_OP(op, Params) \
  namespace portable {             \
  Status op(const Params& p);      \
  }                                \
  Status op(const Params& p) { return portable::op(p); }
#endif

SPECDEC_CPU_OP(accept_greedy, AcceptGreedyParams)
SPECDEC_CPU_OP(accept_sampled, AcceptSampledParams)
SPECDEC_CPU_OP(commit, CommitParams)
SPECDEC_CPU_OP(conv_commit, ConvCommitParams)
SPECDEC_CPU_OP(conv_verify, ConvVerifyParams)
SPECDEC_CPU_OP(likeliest, LikeliestParams)
SPECDEC_CPU_OP(prefill, PrefillParams)
SPECDEC_CPU_OP(linear, LinearParams)
SPECDEC_CPU_OP(rms_norm, RmsNormParams)
SPECDEC_CPU_OP(swiglu, SwigluParams)
SPECDEC_CPU_OP(gated_delta_gates, GatesParams)
SPECDEC_CPU_OP(sampling_probs, SamplingProbsParams)
SPECDEC_CPU_OP(draw_tokens, DrawParams)
SPECDEC_CPU_OP(rotate_heads, RotateHeadsParams)
SPECDEC_CPU_OP(tree_attention, TreeAttentionParams)
SPECDEC_CPU_OP(verify, VerifyParams)
SPECDEC_CPU_OP(verify_layer, VerifyLayerParams)

}  // namespace specdec::cpu
