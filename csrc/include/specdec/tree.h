// The schedule of a draft tree: what a kernel needs to walk it serially, in heavy-light chains, or as a
// masked solve.
//
// A node's largest child (by subtree size, ties to the smaller index) continues its chain; every other child
// and every root starts a new one. A chain's wave is the number of such light edges above it, so the chains
// of a wave are independent, a tree of n nodes has at most log2(n + 1) waves, and walking in `order` needs
// `waves` state buffers: node i lives in buffer level[i], a heavy child overwrites its parent's buffer, a
// light child copies it one level up first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>

#include "specdec/types.h"

namespace specdec {

// What is wrong with a parents array; `ok()` where nothing is.
struct TreeError {
  enum class Kind : int32_t { kNone, kNodes, kParent };
  Kind kind = Kind::kNone;
  int64_t node = -1;       // the first offending node; the node count for kNodes
  int64_t value = 0;       // its parent
  int64_t first_node = 0;  // id of parents[0]: the number of prefix nodes

  bool ok() const { return kind == Kind::kNone; }

  // Writes one line into text. A row >= 0 is named as the sequence: parents[row, node].
  void format(char* text, size_t size, int64_t row = -1) const {
    if (kind == Kind::kNodes) {
      std::snprintf(text, size, "parents has %lld nodes, want 0 to %d", static_cast<long long>(node),
                    kMaxSolveNodes);
      return;
    }
    char where[32] = "";
    if (row >= 0) std::snprintf(where, sizeof(where), "%lld, ", static_cast<long long>(row));
    const long long last = first_node + node - 1;
    if (last >= 0) {
      std::snprintf(text, size, "parents[%s%lld] is %lld, want -1 (a root) or an earlier node (0 to %lld)",
                    where, static_cast<long long>(node), static_cast<long long>(value), last);
    } else {
      std::snprintf(text, size, "parents[%s%lld] is %lld, want -1: the first node is a root", where,
                    static_cast<long long>(node), static_cast<long long>(value));
    }
  }
};

// Checks that -1 <= parents[i] < first_node + i (int32_t or int64_t), where first_node is the number of
// prefix nodes that come before.
template <typename Int>
inline TreeError check_parents(const Int* parents, int64_t nodes, int64_t first_node = 0) {
  TreeError error;
  error.first_node = first_node;
  if (nodes < 0 || first_node + nodes > kMaxSolveNodes) {
    error.kind = TreeError::Kind::kNodes;
    error.node = first_node + nodes;
    return error;
  }
  for (int64_t i = 0; i < nodes; ++i) {
    if (parents[i] >= -1 && parents[i] < first_node + i) continue;
    error.kind = TreeError::Kind::kParent;
    error.node = i;
    error.value = parents[i];
    return error;
  }
  return error;
}

// Fixed storage, no allocation, about 20 KB: keep one per thread or on the stack and rebuild it. Entries
// beyond `nodes`, `chains` and `waves` are indeterminate.
struct TreeSchedule {
  static constexpr int kMaxNodes = kMaxSolveNodes;
  // w waves take 2^w - 1 nodes: a light child has a sibling of at least its size.
  static constexpr int kMaxWaves = 8;
  static_assert((1 << kMaxWaves) - 1 <= kMaxNodes && kMaxNodes < (2 << kMaxWaves) - 1, "kMaxWaves is stale");

  int32_t nodes = 0, chains = 0, waves = 0;
  int32_t words = 0;  // 64-bit words in a row of `ancestors`

  int32_t parent[kMaxNodes];       // -1: a root
  int32_t depth[kMaxNodes];        // a root has 0
  int32_t size[kMaxNodes];         // nodes of the subtree, itself included
  int32_t heavy[kMaxNodes];        // the child that continues the chain; -1: a leaf
  int32_t light_count[kMaxNodes];  // children that start chains of their own; > 0: the state must be kept
  int32_t level[kMaxNodes];        // wave of the node's chain
  int32_t chain_of[kMaxNodes];
  int32_t order[kMaxNodes];     // depth first, light children before the heavy one
  int32_t position[kMaxNodes];  // order[position[i]] == i

  // Chain c is chain_nodes[chain_begin[c] .. chain_begin[c + 1]), root to leaf.
  int32_t chain_begin[kMaxNodes + 1];
  int32_t chain_nodes[kMaxNodes];
  int32_t chain_parent[kMaxNodes];  // the node whose state chain c starts from; -1: the committed state
  // Wave w is the chains wave_begin[w] .. wave_begin[w + 1), by first node.
  int32_t wave_begin[kMaxWaves + 1];

  // Row i is `words` words at ancestors + i * words: bit j is set iff j is i or an ancestor of i.
  uint64_t ancestors[kMaxNodes * (kMaxNodes / 64)];

  bool is_ancestor_or_self(int32_t j, int32_t i) const {
    return ancestors[i * words + (j >> 6)] >> (j & 63) & 1;
  }

  // `p` has `n` entries and has passed check_parents.
  void build(const int32_t* p, int64_t n) {
    nodes = static_cast<int32_t>(n);
    for (int32_t i = 0; i < nodes; ++i) {
      parent[i] = p[i];
      depth[i] = p[i] < 0 ? 0 : depth[p[i]] + 1;
    }
    finish();
  }

  // The tree 0 <- 1 <- 2 ...
  void build_chain(int64_t n) {
    nodes = static_cast<int32_t>(n);
    for (int32_t i = 0; i < nodes; ++i) {
      parent[i] = i - 1;
      depth[i] = i;
    }
    finish();
  }

 private:
  void finish() {
    find_heavy_children();
    place_nodes();
    cut_chains();
    mark_ancestors();
  }

  void find_heavy_children() {
    for (int32_t i = 0; i < nodes; ++i) {
      size[i] = 1;
      heavy[i] = -1;
      light_count[i] = -1;  // the heavy child brings it to 0
    }
    for (int32_t i = nodes - 1; i >= 0; --i) {
      if (heavy[i] < 0) light_count[i] = 0;
      const int32_t p = parent[i];
      if (p < 0) continue;
      size[p] += size[i];
      ++light_count[p];
      // i descends, so a tie goes to the smaller index.
      if (heavy[p] < 0 || size[i] >= size[heavy[p]]) heavy[p] = i;
    }
  }

  // Depth-first positions from subtree sizes, without a stack: the light children of p fill up from
  // position[p] + 1, the heavy one ends where p's subtree ends.
  void place_nodes() {
    int32_t next_root = 0;
    int32_t next_light[kMaxNodes];
    for (int32_t i = 0; i < nodes; ++i) {
      const int32_t p = parent[i];
      if (p >= 0 && heavy[p] == i) {
        position[i] = position[p] + size[p] - size[i];
      } else {
        int32_t& next = p < 0 ? next_root : next_light[p];
        position[i] = next;
        next += size[i];
      }
      next_light[i] = position[i] + 1;
      order[position[i]] = i;
    }
  }

  void cut_chains() {
    int32_t count[kMaxWaves] = {};
    chains = waves = 0;
    for (int32_t i = 0; i < nodes; ++i) {
      const int32_t p = parent[i];
      const bool continues = p >= 0 && heavy[p] == i;
      level[i] = p < 0 ? 0 : level[p] + (continues ? 0 : 1);
      if (continues) continue;
      ++chains;
      ++count[level[i]];
      if (level[i] + 1 > waves) waves = level[i] + 1;
    }
    int32_t next_chain[kMaxWaves];
    wave_begin[0] = 0;
    for (int32_t w = 0; w < waves; ++w) {
      next_chain[w] = wave_begin[w];
      wave_begin[w + 1] = wave_begin[w] + count[w];
    }
    int32_t length[kMaxNodes];
    for (int32_t i = 0; i < nodes; ++i) {
      const int32_t p = parent[i];
      if (p >= 0 && heavy[p] == i) {
        chain_of[i] = chain_of[p];
        ++length[chain_of[i]];
        continue;
      }
      const int32_t c = next_chain[level[i]]++;
      chain_of[i] = c;
      chain_parent[c] = p;
      length[c] = 1;
    }
    int32_t next_node[kMaxNodes];
    chain_begin[0] = 0;
    for (int32_t c = 0; c < chains; ++c) {
      next_node[c] = chain_begin[c];
      chain_begin[c + 1] = chain_begin[c] + length[c];
    }
    for (int32_t i = 0; i < nodes; ++i) chain_nodes[next_node[chain_of[i]]++] = i;
  }

  void mark_ancestors() {
    words = (nodes + 63) / 64;
    for (int32_t i = 0; i < nodes; ++i) {
      uint64_t* row = ancestors + i * words;
      const uint64_t* above = ancestors + parent[i] * words;
      for (int32_t w = 0; w < words; ++w) row[w] = parent[i] < 0 ? 0 : above[w];
      row[i >> 6] |= uint64_t{1} << (i & 63);
    }
  }
};

}  // namespace specdec
