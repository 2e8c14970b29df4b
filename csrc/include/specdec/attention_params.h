// Attention of a tree of new tokens to the key-value cache of their sequence and to their own ancestors.
#pragma once

#include "specdec/params.h"

namespace specdec {

constexpr int kMaxAttentionNodes = 256;      // new and prefix nodes of a row
constexpr int64_t kMaxAttentionWidth = 256;  // D
constexpr int64_t kAttentionMultiple = 16;   // of which D is one

// Keys and values of nodes, [B, N, HK, D] both.
struct KvNodesView {
  const void* k = nullptr;
  const void* v = nullptr;
  Strides k_stride, v_stride;
  int64_t nodes = 0;  // N
};

// Keys and values of the committed tokens, [S, HK, Tmax, D] both; here a stride of `b` is a slot's, of `n` a
// token's. Only the first lengths[s] tokens of slot s are read.
struct KvCacheView {
  const void* k = nullptr;
  const void* v = nullptr;
  Strides k_stride, v_stride;
  const int32_t* lengths = nullptr;  // [S]; clamped to [0, room]
  int64_t slots = 0;                 // S
  int64_t room = 0;                  // Tmax
};

struct TreeAttentionParams {
  int64_t B = 0, N = 0, HQ = 0, HK = 0, D = 0;  // HQ % HK == 0; query head h reads key head h / (HQ / HK)
  DType dtype = DType::kFloat32;                // of everything but the lengths and the tree

  const void* q = nullptr;  // [B, N, HQ, D]
  Strides q_stride;
  float scale = 1.0f;  // multiplies q
  KvNodesView nodes;   // the N new nodes
  KvCacheView cache;
  const int32_t* slots = nullptr;    // [B]; negative: padding; null: row b is slot b
  const int32_t* parents = nullptr;  // [B, N], ids over prefix then new nodes, -1 root; null: a chain
  const int32_t* lengths = nullptr;  // [B] valid new nodes; null: all N

  KvNodesView prefix;                       // nodes 0..NP-1, not committed; none of them is computed
  const int32_t* prefix_parents = nullptr;  // [B, NP]; null: a chain

  void* out = nullptr;  // [B, N, HQ, D] contiguous
};

// y[i] = x[i] cos[i] + x[i +- D/2] sin[i]: dimension i turns with i + D/2, rotation holds [cos, sin].
struct RotateHeadsParams {
  int64_t B = 0, N = 0, H = 0, D = 0;
  DType dtype = DType::kFloat32;
  const void* x = nullptr;  // [B, N, H, D]
  Strides x_stride;
  const float* rotation = nullptr;                       // [B, N, 2, D]; [2, D] contiguous
  int64_t rotation_stride_b = 0, rotation_stride_n = 0;  // 0: the same for all
  void* y = nullptr;                                     // [B, N, H, D] contiguous
};

}  // namespace specdec
