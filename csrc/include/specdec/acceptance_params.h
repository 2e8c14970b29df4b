// Parameter structs of acceptance: which drafts are kept and which token follows. As in params.h, every
// pointer carries its shape, strides count elements, last dimensions are contiguous and optional pointers may
// be null.
#pragma once

#include <cstdint>

#include "specdec/types.h"

namespace specdec {

// The round's candidates. Node 0 is the root token, emitted before and accepted always; parents come before
// their children.
struct DraftView {
  const int64_t* tokens = nullptr;   // [B, N]
  const int32_t* parents = nullptr;  // [B, N], -1 for node 0; null: a chain
  const int32_t* lengths = nullptr;  // [B] valid nodes; 0: an absent row; null: all N
};

// What a round decided. Nothing is written beyond these.
struct AcceptedView {
  int32_t* path = nullptr;          // [B, P] nodes from node 0 to the last accepted one, 0 beyond the length
  int32_t* path_lengths = nullptr;  // [B]; 0 where the row's length is 0
  int64_t* next_token = nullptr;    // [B] the token that follows; 0 where the row's length is 0
  int64_t max_length = 0;           // P, at least N
};

// Greedy: a drafted token is right if it is the argmax at its parent, ties to the smaller token. Of several
// accepted nodes of the greatest depth the one of lowest index is taken.
struct AcceptGreedyParams {
  int64_t B = 0, N = 0, V = 0;
  const void* logits = nullptr;  // [B, N, V]; of NaNs the first is the largest
  DType dtype = DType::kFloat32;
  int64_t stride_b = 0, stride_n = 0;
  DraftView draft;
  AcceptedView accepted;
};

// Exact sampling. Rows are probabilities after processing; row n of the target is the distribution of the
// token after node n, row n of the draft what node n + 1 was drawn from.
//   With p_draft, a chain: draft x is accepted where u q(x) < p(x), and q(x) > 0; the first rejection emits a
//   token of [p - q]+ (of p where that is zero throughout); if there is none, a bonus token of p follows.
//   Without, drafts that were not drawn at random, a chain or a tree: a token is drawn from p at node after
//   node, as plain decoding draws it, and the walk goes on into the child that carries it.
// A token is drawn by inverting the cumulative sum of float64 weights at a uniform. Its order of summation
// depends on V alone: a row gives the same token whatever else is in the call.
struct AcceptSampledParams {
  int64_t B = 0, N = 0, V = 0;
  const float* p_target = nullptr;  // [B, N, V]
  int64_t target_stride_b = 0, target_stride_n = 0;
  const float* p_draft = nullptr;  // [B, N - 1, V]; null: drafts that were not drawn at random
  int64_t draft_stride_b = 0, draft_stride_n = 0;
  // Uniforms in [0, 1) by the number of tokens the round emitted before.
  const double* accept_uniforms = nullptr;  // [B, N]; the last is not read; unused without p_draft
  const double* sample_uniforms = nullptr;  // [B, N]
  DraftView draft;
  AcceptedView accepted;  // next_token is -1 where the weights have no positive finite sum
};

}  // namespace specdec
