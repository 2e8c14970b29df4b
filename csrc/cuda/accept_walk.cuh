// The walk of a round over its candidates: the deepest node whose path spells what the target wants.
#pragma once

#include "device_values.cuh"
#include "specdec/acceptance_params.h"

namespace specdec::cuda {

constexpr int kMaxAcceptNodes = 4096;  // N
constexpr int kWalkThreads = 128;

SPECDEC_DEVICE int draft_length(const DraftView& draft, int64_t b, int64_t N) {
  return length_of(draft.lengths, b, N);
}

SPECDEC_DEVICE int draft_parent(const DraftView& draft, int64_t b, int64_t N, int node) {
  if (draft.parents == nullptr) return node - 1;
  return parent_of(Global<const int32_t>(draft.parents).load(b * N + node), node);
}

inline int64_t walk_shared_bytes(int64_t N) {
  return (N + 3) / 4 * 4 * 3 * static_cast<int64_t>(sizeof(int32_t)) + 16;
}

// Nothing is right after a row that wants no token.
SPECDEC_DEVICE bool is_wanted(int64_t token, int32_t wanted) { return wanted >= 0 && token == wanted; }

// The block decides row b: want(n) is the token that the target puts after node n, or -1. Every node walks up
// to the root by itself, so the time is that of the deepest path.
template <typename Want>
SPECDEC_DEVICE void walk(const DraftView& draft, const AcceptedView& accepted, int64_t N, int64_t b,
                         SharedArena shared, const Want& want) {
  const int length = draft_length(draft, b, N);
  const Shared<int32_t> wanted = shared.take<int32_t>(N);
  const Shared<int32_t> parents = shared.take<int32_t>(N);
  const Shared<int32_t> right = shared.take<int32_t>(N);  // the node's token is what its parent wants
  const Shared<int32_t> best = shared.take<int32_t>(kWalkThreads / 32);
  for (int n = thread(); n < length; n += kWalkThreads) {
    wanted.store(n, want(n));
    parents.store(n, draft_parent(draft, b, N, n));
  }
  barrier();
  const Global<const int64_t> tokens = Global<const int64_t>(draft.tokens) + b * N;
  for (int n = thread(); n < length; n += kWalkThreads) {
    const int parent = parents.load(n);
    right.store(n, n == 0 || (parent >= 0 && is_wanted(tokens.load(n), wanted.load(parent))));
  }
  barrier();
  // The greatest depth, then the lowest index: the largest depth * 2^16 + (2^16 - 1 - node).
  int32_t own = 0;
  for (int n = thread(); n < length; n += kWalkThreads) {
    int node = n, depth = 0;
    for (; node > 0 && right.load(node) != 0; ++depth) node = parents.load(node);
    const int32_t key = (depth << 16) + (0xffff - n);
    if (node == 0 && key > own) own = key;
  }
  for (int mask = 16; mask > 0; mask /= 2) {
    const int32_t other = shuffle_xor(own, mask);
    if (other > own) own = other;
  }
  if (lane() == 0) best.store(warp(), own);
  barrier();
  for (int w = 0; w < kWalkThreads / 32; ++w) {
    const int32_t other = best.load(w);
    if (other > own) own = other;
  }
  const int taken = length > 0 ? (own >> 16) + 1 : 0;
  const Global<int32_t> path = Global<int32_t>(accepted.path) + b * accepted.max_length;
  for (int64_t i = taken + thread(); i < accepted.max_length; i += kWalkThreads) path.store(i, 0);
  if (thread() != 0) return;
  const int leaf = 0xffff - (own & 0xffff);
  Global<int32_t>(accepted.path_lengths).store(b, taken);
  Global<int64_t>(accepted.next_token).store(b, taken > 0 ? wanted.load(leaf) : 0);
  for (int node = leaf, i = taken - 1; i >= 0; --i, node = node > 0 ? parents.load(node) : node)
    path.store(i, node);
}

}  // namespace specdec::cuda
