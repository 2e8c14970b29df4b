// Parameter structs of sampling: which drafts are kept and which token follows, the rows that are sampled
// from, and draws from them. As in params.h, every pointer carries its shape, strides count elements, last
// dimensions are contiguous and optional pointers may be null. acceptance_rules.h has the rules,
// sampling_math.h the arithmetic to the bit.
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
  int64_t* next_token = nullptr;  // [B] the token that follows; 0 where the row's length is 0, -1 where a row
                                  // of logits that the walk came to has no finite maximum or a NaN
  int64_t max_length = 0;         // P, at least N
};

// Greedy: a drafted token is right if it is the argmax at its parent, ties to the smaller token. Of several
// accepted nodes of the greatest depth the one of lowest index is taken.
struct AcceptGreedyParams {
  int64_t B = 0, N = 0, V = 0;
  const void* logits = nullptr;  // [B, N, V]
  DType dtype = DType::kFloat32;
  int64_t stride_b = 0, stride_n = 0;
  DraftView draft;
  AcceptedView accepted;
};

// How rows of logits become rows of probabilities; an entry a row.
struct SamplingView {
  const float* temperature = nullptr;  // 0: all of the mass on the largest logit, ties to the smaller token
  const int32_t* top_k = nullptr;      // 0: all
  const float* top_p = nullptr;        // 1: all
  const float* min_p = nullptr;        // 0: all
};

// The numbers stand in the Python package as well.
enum class AcceptRule : int32_t {
  kFollow,     // drafts that were not drawn at random: draw from p as plain decoding does, follow the draft
  kRecursive,  // siblings drawn independently, tested one by one; on a chain: speculative sampling
  kRecursiveWithoutReplacement,  // siblings drawn in node order without those before them
  kKSeq,                         // SpecTr: siblings drawn independently from one row
  kTraversal,                    // from the leaves up; on a chain: block verification. Drawn independently
  kTraversalWithoutReplacement,
};

struct AcceptSampledParams {
  int64_t B = 0, N = 0, V = 0;
  const void* logits = nullptr;  // [B, N, V] the target's, after node n; whatever edits them is done
  DType dtype = DType::kFloat32;
  int64_t stride_b = 0, stride_n = 0;
  const float* draft_probs = nullptr;  // [R, V]; null where nothing was drawn
  // [B, N] the row that a node was drawn from; siblings drawn without replacement have the row of the eldest.
  // Not read for node 0, nor under kFollow.
  const int32_t* draft_rows = nullptr;
  int64_t R = 0, draft_stride = 0;
  const int32_t* rules = nullptr;      // [B] AcceptRule
  SamplingView sampling;               // [B]
  const uint64_t* seeds = nullptr;     // [B]
  const int64_t* positions = nullptr;  // [B] index in the sequence of the first token that the round emits
  DraftView draft;
  AcceptedView accepted;
};

// Rows to sample from, with the bits that acceptance sees.
struct SamplingProbsParams {
  int64_t R = 0, V = 0;
  const void* logits = nullptr;  // [R, V]
  DType dtype = DType::kFloat32;
  int64_t stride = 0;
  SamplingView sampling;   // [R]
  float* probs = nullptr;  // [R, V] contiguous; NaN throughout where the row has no finite maximum or a NaN
};

// K tokens of each row, at most kMaxDraws, independent or without replacement, from the sequence's DRAFT or
// RACE stream. Independent, token k passes u = uniform(seed, position, kDraft, draw_of(node, k)) of the row's
// sum, as acceptance draws from p. Without replacement token x arrives at arrival_of(u, p(x)) with its u of
// the RACE stream, and the K earliest are taken in their order, of equal ones the smaller token first.
struct DrawParams {
  int64_t R = 0, V = 0, K = 0;
  const float* probs = nullptr;  // [R, V]
  int64_t stride = 0;
  bool replacement = true;
  const uint64_t* seeds = nullptr;     // [R]
  const int64_t* positions = nullptr;  // [R] that of the round, as in AcceptSampledParams
  const int32_t* nodes = nullptr;      // [R] the parent's node in the round; tells its draws from others'
  int64_t* tokens = nullptr;           // [R, K]; -1 where no token of positive weight is left
};

// The K likeliest tokens of each row, descending, of equal ones the smaller first, and their probabilities in
// softmax(logits * scale).
struct LikeliestParams {
  int64_t R = 0, V = 0, K = 0;
  const float* logits = nullptr;  // [R, V]
  const float* scale = nullptr;   // [R] positive; null: 1
  int64_t* tokens = nullptr;      // [R, K]; -1 where none is left above -inf, or the row is no distribution
  float* probs = nullptr;         // [R, K]; 0 there
};

constexpr int64_t kMostLikeliest = 64;

}  // namespace specdec
