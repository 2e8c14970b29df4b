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

// The first entry of a parents array that names no earlier node; `ok()` where there is none.
struct TreeError {
  int64_t node = -1;
  int64_t parent = 0;
  int64_t first = 0;  // id of parents[0]: the number of prefix nodes

  bool ok() const { return node < 0; }

  // Writes what is wrong with the entry, to follow its name: "is 7, want ...".
  void format(char* text, size_t size) const {
    const long long value = parent, last = first + node - 1;
    if (last >= 0) {
      std::snprintf(text, size, "is %lld, want -1 (a root) or an earlier node (0 to %lld)", value, last);
    } else {
      std::snprintf(text, size, "is %lld, want -1: the first node is a root", value);
    }
  }
};

// Checks that -1 <= parents[i] < first + i (int32_t or int64_t), where `first` is the number of prefix nodes
// that come before. Every parents array that a kernel or a schedule sees has passed here.
template <typename Int>
inline TreeError check_parents(const Int* parents, int64_t nodes, int64_t first = 0) {
  for (int64_t i = 0; i < nodes; ++i) {
    if (parents[i] < -1 || parents[i] >= first + i) return {i, parents[i], first};
  }
  return {};
}

// Plain data in fixed storage, no allocation, about 6 KB: keep one per thread or on the stack and rebuild it.
// Node ids run over a prefix of nodes that are verified already, then over the new ones, as in VerifyParams.
// A prefix node without new descendants is not scheduled: it has size 0 and is on no list. Entries beyond
// `nodes`, `scheduled`, `chains` and `waves` are indeterminate.
struct TreeSchedule {
  static constexpr int kMaxNodes = kMaxSolveNodes;
  // w waves take 2^w - 1 nodes: a light child has a sibling of at least its size.
  static constexpr int kMaxWaves = 8;
  static_assert((1 << kMaxWaves) - 1 <= kMaxNodes && kMaxNodes < (2 << kMaxWaves) - 1, "kMaxWaves is stale");

  int32_t nodes = 0, prefix = 0;  // ids below `prefix` are prefix nodes
  int32_t scheduled = 0, chains = 0, waves = 0;

  int16_t parent[kMaxNodes];  // -1: a root
  int16_t depth[kMaxNodes];   // a root has 0
  int16_t size[kMaxNodes];    // scheduled nodes of the subtree, itself included
  int16_t heavy[kMaxNodes];   // the child that continues the chain; -1: a leaf
  int16_t level[kMaxNodes];   // wave of the node's chain
  int16_t chain_of[kMaxNodes];
  int16_t order[kMaxNodes];     // depth first, light children before the heavy one
  int16_t position[kMaxNodes];  // order[position[i]] == i

  // The roots are children[0 .. child_begin[1]), the children of node i children[child_begin[i + 1] ..
  // child_begin[i + 2]), ascending.
  int16_t child_begin[kMaxNodes + 2];
  int16_t children[kMaxNodes];

  // Chain c is chain_nodes[chain_begin[c] .. chain_begin[c + 1]), root to leaf.
  int16_t chain_begin[kMaxNodes + 1];
  int16_t chain_nodes[kMaxNodes];
  int16_t chain_parent[kMaxNodes];  // the node whose state chain c starts from; -1: the committed state
  // Wave w is the chains wave_begin[w] .. wave_begin[w + 1), by first node.
  int16_t wave_begin[kMaxWaves + 1];

  // Scheduled children of a node; -1 names the committed state.
  int32_t child_count(int32_t node) const { return child_begin[node + 2] - child_begin[node + 1]; }
  const int16_t* children_of(int32_t node) const { return children + child_begin[node + 1]; }

  // Ids over `before` prefix nodes, then `n` new ones, at most kMaxNodes in all. Null parents are a chain
  // that continues at the last prefix node; both arrays have passed check_parents.
  void build(const int32_t* parents, int64_t n, const int32_t* prefix_parents = nullptr, int64_t before = 0) {
    prefix = static_cast<int32_t>(before);
    nodes = static_cast<int32_t>(before + n);
    for (int32_t i = 0; i < prefix; ++i) {
      parent[i] = static_cast<int16_t>(prefix_parents != nullptr ? prefix_parents[i] : i - 1);
    }
    for (int32_t i = prefix; i < nodes; ++i) {
      parent[i] = static_cast<int16_t>(parents != nullptr ? parents[i - prefix] : i - 1);
    }
    for (int32_t i = 0; i < nodes; ++i) {
      depth[i] = parent[i] < 0 ? int16_t{0} : static_cast<int16_t>(depth[parent[i]] + 1);
    }
    find_heavy_children();
    list_children();
    place_nodes();
    cut_chains();
  }

 private:
  bool continues_chain(int32_t i) const { return parent[i] >= 0 && heavy[parent[i]] == i; }

  void find_heavy_children() {
    for (int32_t i = 0; i < nodes; ++i) {
      size[i] = i < prefix ? 0 : 1;
      heavy[i] = -1;
    }
    scheduled = 0;
    for (int32_t i = nodes - 1; i >= 0; --i) {
      if (size[i] == 0) continue;
      if (i < prefix) ++size[i];  // a child put it on the schedule
      ++scheduled;
      const int32_t p = parent[i];
      if (p < 0) continue;
      size[p] = static_cast<int16_t>(size[p] + size[i]);
      // i descends, so a tie goes to the smaller index.
      if (heavy[p] < 0 || size[i] >= size[heavy[p]]) heavy[p] = static_cast<int16_t>(i);
    }
  }

  void list_children() {
    for (int32_t i = 0; i <= nodes + 1; ++i) child_begin[i] = 0;
    for (int32_t i = 0; i < nodes; ++i) {
      if (size[i] > 0) ++child_begin[parent[i] + 2];
    }
    int16_t next[kMaxNodes + 1];
    for (int32_t i = 0; i <= nodes; ++i) {
      next[i] = child_begin[i];
      child_begin[i + 1] = static_cast<int16_t>(child_begin[i + 1] + child_begin[i]);
    }
    for (int32_t i = 0; i < nodes; ++i) {
      if (size[i] > 0) children[next[parent[i] + 1]++] = static_cast<int16_t>(i);
    }
  }

  // Depth-first positions from subtree sizes, without a stack: the light children of p fill up from
  // position[p] + 1, the heavy one ends where p's subtree ends.
  void place_nodes() {
    int16_t next_root = 0;
    int16_t next_light[kMaxNodes];
    for (int32_t i = 0; i < nodes; ++i) {
      if (size[i] == 0) continue;
      const int32_t p = parent[i];
      if (continues_chain(i)) {
        position[i] = static_cast<int16_t>(position[p] + size[p] - size[i]);
      } else {
        int16_t& next = p < 0 ? next_root : next_light[p];
        position[i] = next;
        next = static_cast<int16_t>(next + size[i]);
      }
      next_light[i] = static_cast<int16_t>(position[i] + 1);
      order[position[i]] = static_cast<int16_t>(i);
    }
  }

  void cut_chains() {
    int16_t count[kMaxWaves] = {};
    chains = waves = 0;
    for (int32_t i = 0; i < nodes; ++i) {
      if (size[i] == 0) continue;
      const bool continues = continues_chain(i);
      level[i] = parent[i] < 0 ? int16_t{0} : static_cast<int16_t>(level[parent[i]] + (continues ? 0 : 1));
      if (continues) continue;
      ++chains;
      ++count[level[i]];
      if (level[i] + 1 > waves) waves = level[i] + 1;
    }
    int16_t next_chain[kMaxWaves];
    wave_begin[0] = 0;
    for (int32_t w = 0; w < waves; ++w) {
      next_chain[w] = wave_begin[w];
      wave_begin[w + 1] = static_cast<int16_t>(wave_begin[w] + count[w]);
    }
    int16_t length[kMaxNodes];
    for (int32_t i = 0; i < nodes; ++i) {
      if (size[i] == 0) continue;
      if (continues_chain(i)) {
        chain_of[i] = chain_of[parent[i]];
        ++length[chain_of[i]];
        continue;
      }
      const int16_t c = next_chain[level[i]]++;
      chain_of[i] = c;
      chain_parent[c] = parent[i];
      length[c] = 1;
    }
    int16_t next_node[kMaxNodes];
    chain_begin[0] = 0;
    for (int32_t c = 0; c < chains; ++c) {
      next_node[c] = chain_begin[c];
      chain_begin[c + 1] = static_cast<int16_t>(chain_begin[c] + length[c]);
    }
    for (int32_t i = 0; i < nodes; ++i) {
      if (size[i] > 0) chain_nodes[next_node[chain_of[i]]++] = static_cast<int16_t>(i);
    }
  }
};

// Which nodes lie on the path to a node, as bits: the mask of a solve.
struct AncestorMask {
  int32_t words = 0;  // 64-bit words in a row
  // Row i is `words` words at bits + i * words: bit j is set iff j is i or an ancestor of i.
  uint64_t bits[TreeSchedule::kMaxNodes * (TreeSchedule::kMaxNodes / 64)];

  bool is_ancestor_or_self(int32_t j, int32_t i) const { return bits[i * words + (j >> 6)] >> (j & 63) & 1; }

  void build(const int16_t* parent, int32_t nodes) {
    words = (nodes + 63) / 64;
    for (int32_t i = 0; i < nodes; ++i) {
      uint64_t* row = bits + i * words;
      for (int32_t w = 0; w < words; ++w) row[w] = parent[i] < 0 ? 0 : bits[parent[i] * words + w];
      row[i >> 6] |= uint64_t{1} << (i & 63);
    }
  }
};

}  // namespace specdec
