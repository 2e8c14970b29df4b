// Parameter structs that cross from a binding into a backend. Plain pointers; every pointer carries its
// shape, every stride its unit (elements). Optional pointers are null where the argument is absent. Last
// dimensions are contiguous.
#pragma once

#include <cstdint>

#include "specdec/types.h"

namespace specdec {

// Strides of a [B, N, H, D] tensor, in elements; D is contiguous. A [B, N, H] tensor uses the same three
// strides.
struct Strides {
  int64_t b = 0, n = 0, h = 0;
};

// Durable state of all sequences. Slots are addressed in 64 bits: a pool may exceed 2^31 elements.
struct StateView {
  void* data = nullptr;  // [S, HV, DV, DK], one slot contiguous
  DType dtype = DType::kFloat32;
  int64_t slots = 0;        // S
  int64_t slot_stride = 0;  // elements between slots
};

// Factors of N verified nodes, as `verify` wrote them; contiguous float32.
struct FactorsView {
  const float* k = nullptr;  // [B, N, HK, DK]
  const float* u = nullptr;  // [B, N, HV, DV]
  const float* g = nullptr;  // [B, N, HV] or [B, N, HV, DK]; null without gate
  int64_t nodes = 0;         // N
};

// An accepted path into FactorsView, or into the raw inputs of a convolution.
struct PathView {
  const int32_t* path = nullptr;     // [B, P] node indices root to leaf; null: 0, 1, 2, ...
  const int32_t* lengths = nullptr;  // [B]; null: all P
  int64_t max_length = 0;            // P
};

struct Recurrence {
  Gate gate = Gate::kNone;
  Update update = Update::kAdditive;
  int64_t HK = 0, HV = 0, DK = 0, DV = 0;  // HV % HK == 0; value head h reads key head h / (HV / HK)
};

struct VerifyParams {
  Recurrence rec;
  int64_t B = 0, N = 0;           // N new nodes a sequence
  DType dtype = DType::kFloat32;  // of q, k, v and out

  const void* q = nullptr;      // [B, N, HK, DK]
  const void* k = nullptr;      // [B, N, HK, DK]
  const void* v = nullptr;      // [B, N, HV, DV]
  const float* g = nullptr;     // [B, N, HV] or [B, N, HV, DK]
  const float* beta = nullptr;  // [B, N, HV]
  Strides q_stride, k_stride, v_stride, g_stride, beta_stride;
  float scale = 1.0f;      // multiplies q
  bool qk_l2norm = false;  // q, k <- x * rsqrt(sum x^2 + 1e-6), before scale

  StateView state;                   // read; written back only where `pending` is given
  const int32_t* slots = nullptr;    // [B]; negative: padding; null: row b is slot b
  const int32_t* parents = nullptr;  // [B, N], ids over prefix then new nodes, -1 root; null: a chain
  const int32_t* lengths = nullptr;  // [B] valid new nodes; null: all N

  bool has_pending = false;
  FactorsView pending;  // accepted factors of the previous round, folded into the state first
  PathView pending_path;

  bool has_prefix = false;
  FactorsView prefix;  // verified, uncommitted nodes 0..NP-1, replayed on the way to new nodes
  const int32_t* prefix_parents = nullptr;  // [B, NP]; null: a chain

  void* out = nullptr;     // [B, N, HV, DV] contiguous
  float* k_out = nullptr;  // [B, N, HK, DK] contiguous
  float* u_out = nullptr;  // [B, N, HV, DV] contiguous
  float* g_out = nullptr;  // [B, N, HV] or [B, N, HV, DK] contiguous; null without gate

  Strategy strategy = Strategy::kSerial;
};

struct CommitParams {
  Recurrence rec;
  int64_t B = 0;
  FactorsView factors;
  PathView path;
  StateView state;
  const int32_t* slots = nullptr;  // [B]
  CommitMode mode = CommitMode::kExact;
};

struct PrefillParams {
  Recurrence rec;
  int64_t B = 0;  // sequences
  int64_t T = 0;  // padded length, or total tokens when packed
  DType dtype = DType::kFloat32;
  const void* q = nullptr;  // [B, T, HK, DK], or [1, T, HK, DK] packed
  const void* k = nullptr;
  const void* v = nullptr;
  const float* g = nullptr;
  const float* beta = nullptr;
  Strides q_stride, k_stride, v_stride, g_stride, beta_stride;
  float scale = 1.0f;
  bool qk_l2norm = false;
  StateView state;                      // read, advanced, written
  const int32_t* slots = nullptr;       // [B]
  const int32_t* lengths = nullptr;     // [B], padded form; null: all T
  const int32_t* cu_seqlens = nullptr;  // [B + 1], packed form
  void* out = nullptr;                  // [B, T, HV, DV] contiguous, or [1, T, HV, DV]
};

// Last W-1 raw inputs of every sequence, oldest first.
struct ConvStateView {
  void* data = nullptr;  // [S, W-1, C], one slot contiguous
  DType dtype = DType::kFloat32;
  int64_t slots = 0;
  int64_t slot_stride = 0;
};

// Raw inputs [B, N, C] with free B and N strides.
struct ConvInputView {
  const void* x = nullptr;
  DType dtype = DType::kFloat32;
  int64_t nodes = 0;
  int64_t stride_b = 0, stride_n = 0;
};

struct ConvVerifyParams {
  int64_t B = 0, N = 0, C = 0, W = 0;
  ConvInputView x;
  const float* weight = nullptr;  // [C, W] contiguous, the newest input last
  const float* bias = nullptr;    // [C]
  Activation activation = Activation::kSilu;
  ConvStateView state;
  const int32_t* slots = nullptr;
  const int32_t* parents = nullptr;
  const int32_t* lengths = nullptr;
  bool has_pending = false;
  ConvInputView pending;
  PathView pending_path;
  bool has_prefix = false;
  ConvInputView prefix;
  const int32_t* prefix_parents = nullptr;
  void* y = nullptr;  // [B, N, C] contiguous, dtype of x
};

struct ConvCommitParams {
  int64_t B = 0, C = 0, W = 0;
  ConvInputView x;
  PathView path;
  ConvStateView state;
  const int32_t* slots = nullptr;
};

}  // namespace specdec
