// Vocabulary shared by every backend: element types, recurrence choices, status codes. No torch, no CUDA.
#pragma once

#include <cstdint>

namespace specdec {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16 };

// The recurrence S_i = gate(S_p) + update(k_i, v_i, beta_i) is chosen by two independent parts.
enum class Gate : int32_t { kNone, kHead, kChannel };  // decay: none, one per value head, one per key channel
enum class Update : int32_t { kAdditive, kDelta };     // write v, or beta (v - S k)

// The Python names `exact` and `auto` are resolved before a call, from the measured table.
enum class Strategy : int32_t { kSerial, kHybrid, kSolve };

// How a commit computes: token by token with the operations of the step, or as one small matrix product.
enum class CommitMode : int32_t { kExact, kFast };

// Matrix products of solve and prefill: float32 arithmetic; on tensor cores three TF32 products of split
// operands, which is float32-accurate; one TF32 product; one bfloat16 product. All add in float32.
enum class Precision : int32_t { kIeee, kTf32x3, kTf32, kBf16 };

enum class Activation : int32_t { kNone, kSilu };

enum class Status : int32_t {
  kOk = 0,
  kUnsupported,      // a shape, dtype or strategy that this backend has no kernel for
  kInvalidArgument,  // a parameter struct that contradicts itself
  kLaunchFailed,     // the GPU's runtime refused a launch, or an earlier one has failed
};

constexpr int kMaxSerialNodes = 64;  // N of serial and hybrid verification, prefix included
constexpr int kMaxSolveNodes = 256;  // N of the masked solve
constexpr int kMaxConvWidth = 16;    // W of the short convolution

}  // namespace specdec
