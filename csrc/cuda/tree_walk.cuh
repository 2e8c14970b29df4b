// The walk of a tree, found by the threads of a block: parents are on the device, so no host can plan it.
//
// The committed state is the root above all roots. A node's largest child (by nodes below it, ties to the
// smaller index) continues its chain and is visited last; the others, ascending, start chains one level up. A
// state with several children is saved in the slot of its chain's level before the first child and restored
// before the others. A light child has at most half of what is below its parent, so n nodes take at most
// log2 n slots. Prefix nodes without new descendants are left out.
#pragma once

#include "device_values.cuh"
#include "specdec/params.h"

namespace specdec::cuda {

// One stop of the walk, packed in an int32_t.
struct Visit {
  enum Action : int32_t { kNothing, kSave, kRestore };

  int32_t node;    // prefix nodes first
  bool leaf;       // nobody reads its state
  int32_t action;  // before the step
  int32_t slot;    // of the action

  SPECDEC_DEVICE static int32_t pack(int32_t node, bool leaf, int32_t action, int32_t slot) {
    return node | (leaf ? 1 << 8 : 0) | action << 9 | slot << 11;
  }
  SPECDEC_DEVICE static Visit unpack(int32_t x) { return {x & 255, (x >> 8 & 1) != 0, x >> 9 & 3, x >> 11}; }
};

class TreeWalk {
 public:
  static constexpr int kMaxNodes = kMaxSerialNodes;
  static constexpr int64_t kSharedBytes = 8 * kMaxNodes * sizeof(int32_t);
  static_assert(kMaxNodes == 64);

  // Slots that a walk over `nodes` nodes may need.
  SPECDEC_HOST_DEVICE static int slots(int64_t nodes) {
    int count = 0;
    for (int64_t below = nodes; below >= 2; below = below / 2 - 1) ++count;
    return count;
  }

  TreeWalk() = default;
  SPECDEC_DEVICE explicit TreeWalk(SharedArena& shared)
      : parent_(shared.take<int32_t>(kMaxNodes)),
        above_low_(shared.take<uint32_t>(kMaxNodes)),
        above_high_(shared.take<uint32_t>(kMaxNodes)),
        size_(shared.take<int32_t>(kMaxNodes)),
        heavy_(shared.take<int32_t>(kMaxNodes)),
        before_(shared.take<int32_t>(kMaxNodes)),
        visits_(shared.take<int32_t>(kMaxNodes)),
        chain_(shared.take<int32_t>(kMaxNodes)) {}

  // A chain needs no walk.
  SPECDEC_HOST_DEVICE static bool wanted(const VerifyParams& p) {
    return p.parents != nullptr || (p.has_prefix && p.prefix_parents != nullptr);
  }

  // The tree of row b with `length` new nodes, by all threads of a block of at least kMaxNodes.
  SPECDEC_DEVICE void build(const VerifyParams& p, int64_t b, int length) {
    const int i = thread(), prefix = p.has_prefix ? static_cast<int>(p.prefix.nodes) : 0;
    const int nodes = nodes_ = prefix + length;
    if (i < nodes) {
      const bool old = i < prefix;
      const int32_t* parents = old ? p.prefix_parents : p.parents;
      const int64_t at = old ? b * prefix + i : b * p.N + i - prefix;
      parent_.store(i, parents != nullptr ? parent_of(Global<const int32_t>(parents).load(at), i) : i - 1);
    }
    barrier();
    uint32_t low = 0, high = 0;  // i and its ancestors
    if (i < nodes) {
      for (int a = i; a >= 0; a = parent_.load(a)) {
        (a < 32 ? low : high) |= uint32_t{1} << (a % 32);
      }
      above_low_.store(i, low);
      above_high_.store(i, high);
    }
    barrier();
    if (i < nodes) size_.store(i, count_below(i, nodes, prefix));
    barrier();
    // Unscheduled nodes take part in nothing from here on.
    const int size = i < nodes ? size_.load(i) : 0;
    const int parent = size > 0 ? parent_.load(i) : -1;
    if (size > 0) {
      bool heavy = true;
      for (int j = 0; j < nodes; ++j) {
        if (j == i || parent_.load(j) != parent || size_.load(j) == 0) continue;
        heavy = heavy && (size_.load(j) < size || (size_.load(j) == size && j > i));
      }
      heavy_.store(i, heavy);
    }
    barrier();
    int before = 0;  // nodes below the parent that are visited before i
    if (size > 0) {
      const bool heavy = heavy_.load(i) != 0;
      for (int j = 0; j < nodes; ++j) {
        if (j == i || parent_.load(j) != parent || size_.load(j) == 0) continue;
        if (heavy || (j < i && heavy_.load(j) == 0)) before += size_.load(j);
      }
      before_.store(i, before);
    }
    barrier();
  }

  // Depth first, by all threads after `build`. Returns the number of visits.
  SPECDEC_DEVICE int order_nodes() {
    const int i = thread();
    if (scheduled(i)) {
      int position = -1, level = 0;
      for (int j = 0; j <= i; ++j) {
        if (!above(j, i)) continue;
        position += 1 + before_.load(j);
        level += heavy_.load(j) == 0;
      }
      // With brothers, the first to be visited saves the parent's state in the slot of the parent's level.
      const bool alone =
          size_.load(i) == (parent_.load(i) < 0 ? below_roots() : size_.load(parent_.load(i)) - 1);
      const int32_t action = alone ? Visit::kNothing : before_.load(i) == 0 ? Visit::kSave : Visit::kRestore;
      const int32_t slot = level - (heavy_.load(i) == 0);
      visits_.store(position, Visit::pack(i, size_.load(i) == 1, action, slot));
    }
    barrier();
    return below_roots();
  }

  // One chain of the tree, by all threads after `build`: chain 0 is that of the largest root, and every chain
  // comes after the one that it starts from. kSave marks the nodes from whose state other chains start, with
  // their number among all such nodes as the slot.
  struct Chain {
    int nodes = 0;    // 0: the tree has no such chain
    int source = -1;  // slot of the state that it starts from; -1: the committed state
  };
  SPECDEC_DEVICE Chain cut_chain(int index) {
    const int i = thread();
    int head = i, level = 0, place = 0;  // the chain's first node and level, i's place in the chain
    bool branches = false;
    if (scheduled(i)) {
      for (int j = 0; j <= i; ++j) {
        if (!above(j, i)) continue;
        const bool light = heavy_.load(j) == 0;
        level += light;
        place = light || parent_.load(j) < 0 ? 0 : place + 1;
        if (place == 0) head = j;
      }
      for (int j = i + 1; j < nodes_; ++j) {
        branches = branches || (parent_.load(j) == i && scheduled(j) && heavy_.load(j) == 0);
      }
      before_.store(i, head == i ? level * kMaxNodes + i : kNoHead);  // heads in the order of their chains
      chain_.store(i, branches);
    }
    barrier();
    int rank = 0, slot = 0, source = -1;
    if (scheduled(i)) {
      const int key = before_.load(head), from = parent_.load(head);
      for (int j = 0; j < nodes_; ++j) {
        if (!scheduled(j)) continue;
        rank += before_.load(j) < key;
        slot += j < i && chain_.load(j) != 0;
        source += j <= from && chain_.load(j) != 0;
      }
      if (rank == index) {
        visits_.store(place,
                      Visit::pack(i, size_.load(i) == 1, branches ? Visit::kSave : Visit::kNothing, slot));
      }
    }
    barrier();
    if (scheduled(i)) {
      before_.store(i, rank);
      chain_.store(i, source);
    }
    barrier();
    Chain chain;
    for (int j = 0; j < nodes_; ++j) {
      if (!scheduled(j) || before_.load(j) != index) continue;
      ++chain.nodes;
      chain.source = chain_.load(j);
    }
    return chain;
  }

  SPECDEC_DEVICE Visit visit(int i) const { return Visit::unpack(visits_.load(i)); }

 private:
  static constexpr int32_t kNoHead = 1 << 20;

  SPECDEC_DEVICE bool scheduled(int i) const { return i < nodes_ && size_.load(i) > 0; }
  // Is j the node i or above it?
  SPECDEC_DEVICE bool above(int j, int i) const {
    return ((j < 32 ? above_low_ : above_high_).load(i) >> (j % 32) & 1) != 0;
  }
  SPECDEC_DEVICE int below_roots() const {
    int count = 0;
    for (int j = 0; j < nodes_; ++j) {
      if (parent_.load(j) < 0) count += size_.load(j);
    }
    return count;
  }

  // Scheduled nodes below i, itself included: 0 for a prefix node without new descendants.
  SPECDEC_DEVICE int count_below(int i, int nodes, int prefix) const {
    int count = 0;
    uint32_t used_low = 0, used_high = 0;  // nodes with a new one below them
    for (int j = prefix; j < nodes; ++j) {
      used_low |= above_low_.load(j);
      used_high |= above_high_.load(j);
    }
    for (int j = i; j < nodes; ++j) {
      const uint32_t used = (j < 32 ? used_low : used_high) >> (j % 32) & 1;
      count += above(i, j) && used != 0;
    }
    return count;
  }

  Shared<int32_t> parent_;
  Shared<uint32_t> above_low_, above_high_;
  Shared<int32_t> size_, heavy_, before_, visits_, chain_;
  int nodes_ = 0;
};

}  // namespace specdec::cuda
