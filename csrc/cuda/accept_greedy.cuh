// accept_greedy: the argmax of every valid row of logits, then the walk over the candidates. Two launches:
// rows are long and few, so each is cut into parts for a block apiece, and the walk joins them.
#pragma once

#include "draft_nodes.cuh"
#include "greatest_logit.cuh"

namespace specdec::cuda {

struct AcceptGreedyWork {
  AcceptGreedyParams op;
  uint64_t* best = nullptr;  // [B, N, parts]

  SPECDEC_HOST_DEVICE int parts() const { return parts_of(op.V); }  // of a row, a block each
};

// -1 where the row has no finite maximum or a NaN.
SPECDEC_DEVICE int32_t greedy_token(uint64_t key) {
  return is_finite_rank(rank_of_key(key)) ? static_cast<int32_t>(token_of_key(key)) : -1;
}

// The best key of each part of each row.
template <typename T, bool kVector>
struct GreedyParts {
  using Params = AcceptGreedyWork;
  static constexpr int kThreads = 256;
  static constexpr int kVec = kVector ? 16 / static_cast<int>(sizeof(T)) : 1;

  static Launch shape(const Params& p) {
    const int64_t blocks = p.op.B * p.op.N * p.parts();
    return {{blocks <= INT32_MAX ? static_cast<int32_t>(blocks) : -1, 1, 1},
            kThreads / 32 * sizeof(uint64_t)};
  }

  SPECDEC_DEVICE static void run(const Params& p, SharedArena shared) {
    const int parts = p.parts();
    const int part = block().x % parts;
    const int64_t row = block().x / parts, b = row / p.op.N;
    const int n = static_cast<int>(row % p.op.N);
    if (n >= draft_length(p.op.draft, b, p.op.N)) return;
    const int64_t first = int64_t{part} * kPartElements;
    const int64_t end = first + kPartElements < p.op.V ? first + kPartElements : p.op.V;
    const Global<const T> logits =
        Global<const T>(static_cast<const T*>(p.op.logits)) + b * p.op.stride_b + n * p.op.stride_n;
    uint64_t best = 0;
    SPECDEC_UNROLL_BY(4)
    for (int64_t i = first + thread() * kVec; i < end; i += kThreads * kVec) {
      if constexpr (kVector) {
        const Pack<T, kVec> pack = logits.template load_vec<kVec>(i);
        SPECDEC_UNROLL
        for (int j = 0; j < kVec; ++j) best = larger_key(best, greatest_key(float_of(pack[j]), i + j));
      } else {
        best = larger_key(best, greatest_key(float_of(logits.load(i)), i));
      }
    }
    best = largest_of_warp(best);
    const Shared<uint64_t> of_warps = shared.take<uint64_t>(kThreads / 32);
    if (lane() == 0) of_warps.store(warp(), best);
    barrier();
    if (thread() != 0) return;
    for (int w = 1; w < kThreads / 32; ++w) best = larger_key(best, of_warps.load(w));
    Global<uint64_t>(p.best).store(block().x, best);
  }
};

// The block decides a row: the deepest node whose path spells what the target wants. Every node walks up to
// the root by itself, so the time is that of the deepest path.
struct GreedyWalk {
  using Params = AcceptGreedyWork;
  static constexpr int kThreads = 128;

  static Launch shape(const Params& p) {
    return {{static_cast<int32_t>(p.op.B), 1, 1},
            (p.op.N + 3) / 4 * 4 * 3 * static_cast<int64_t>(sizeof(int32_t)) + 16};
  }

  SPECDEC_DEVICE static void run(const Params& p, SharedArena shared) {
    const DraftView& draft = p.op.draft;
    const AcceptedView& accepted = p.op.accepted;
    const int64_t b = block().x, N = p.op.N;
    const int length = draft_length(draft, b, N);
    const Shared<int32_t> wanted = shared.take<int32_t>(N);
    const Shared<int32_t> parents = shared.take<int32_t>(N);
    const Shared<int32_t> right = shared.take<int32_t>(N);  // the node's token is what its parent wants
    const Shared<int32_t> best = shared.take<int32_t>(kThreads / 32);
    for (int n = thread(); n < length; n += kThreads) {
      wanted.store(n, want(p, b * N + n));
      parents.store(n, draft_parent(draft, b, N, n));
    }
    barrier();
    const Global<const int64_t> tokens = Global<const int64_t>(draft.tokens) + b * N;
    for (int n = thread(); n < length; n += kThreads) {
      const int parent = parents.load(n);
      right.store(n, n == 0 || (parent >= 0 && is_wanted(tokens.load(n), wanted.load(parent))));
    }
    barrier();
    // The greatest depth, then the lowest index: the largest depth * 2^16 + (2^16 - 1 - node).
    int32_t own = 0;
    for (int n = thread(); n < length; n += kThreads) {
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
    for (int w = 0; w < kThreads / 32; ++w) {
      const int32_t other = best.load(w);
      if (other > own) own = other;
    }
    const int taken = length > 0 ? (own >> 16) + 1 : 0;
    const Global<int32_t> path = Global<int32_t>(accepted.path) + b * accepted.max_length;
    for (int64_t i = taken + thread(); i < accepted.max_length; i += kThreads) path.store(i, 0);
    if (thread() != 0) return;
    const int leaf = 0xffff - (own & 0xffff);
    Global<int32_t>(accepted.path_lengths).store(b, taken);
    Global<int64_t>(accepted.next_token).store(b, taken > 0 ? wanted.load(leaf) : 0);
    for (int node = leaf, i = taken - 1; i >= 0; --i, node = node > 0 ? parents.load(node) : node)
      path.store(i, node);
  }

 private:
  // The token that the target puts after a node; -1: none.
  SPECDEC_DEVICE static int32_t want(const Params& p, int64_t row) {
    const int parts = p.parts();
    const Global<const uint64_t> keys = Global<const uint64_t>(p.best) + row * parts;
    uint64_t best = 0;
    for (int i = 0; i < parts; ++i) best = larger_key(best, keys.load(i));
    return greedy_token(best);
  }
  // Nothing is right after a row that wants no token.
  SPECDEC_DEVICE static bool is_wanted(int64_t token, int32_t wanted) {
    return wanted >= 0 && token == wanted;
  }
};

}  // namespace specdec::cuda
