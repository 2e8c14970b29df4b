// The walk of a tree, found by the threads of a block: parents are on the device, so no host can plan it.
//
// The committed state is the root above all roots. A node's largest child (by nodes below it, ties to the
// smaller index) continues its chain and is visited last; the others, ascending, start chains one level up. A
// state with several children is saved in the slot of its chain's level before the first child and restored
// before the others. A light child has at most half of what is below its parent, so n nodes take at most
// log2 n slots. Prefix nodes without new descendants are left out.
#pragma once

#include "primitives.cuh"
#include "specdec/types.h"

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
  static constexpr int64_t kSharedBytes = 7 * kMaxNodes * sizeof(int32_t);
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
        visits_(shared.take<int32_t>(kMaxNodes)) {}

  // By all threads of a block of at least kMaxNodes. Null parents: a chain (see VerifyParams). Returns the
  // number of visits.
  SPECDEC_DEVICE int build(const Global<const int32_t>& parents, int length, const Global<const int32_t>& prefix_parents,
                           int prefix) {
    const int i = thread(), nodes = prefix + length;
    if (i < nodes) {
      const bool given = i < prefix ? static_cast<bool>(prefix_parents) : static_cast<bool>(parents);
      parent_.store(i, !given ? i - 1 : i < prefix ? prefix_parents.load(i) : parents.load(i - prefix));
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
    int siblings = 0;
    if (size > 0) {
      bool heavy = true;
      for (int j = 0; j < nodes; ++j) {
        if (j == i || parent_.load(j) != parent || size_.load(j) == 0) continue;
        ++siblings;
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
    int roots_end = 0;
    for (int j = 0; j < nodes; ++j) {
      if (parent_.load(j) < 0) roots_end += size_.load(j);
    }
    if (size > 0) {
      int position = -1, level = 0;
      for (int j = 0; j <= i; ++j) {
        if (((j < 32 ? low : high) >> (j % 32) & 1) == 0) continue;
        position += 1 + before_.load(j);
        level += heavy_.load(j) == 0;
      }
      const int32_t action = siblings == 0 ? Visit::kNothing : before == 0 ? Visit::kSave : Visit::kRestore;
      const int32_t slot = level - (heavy_.load(i) == 0);  // the level of the parent's chain
      visits_.store(position, Visit::pack(i, size == 1, action, slot));
    }
    barrier();
    return roots_end;
  }

  SPECDEC_DEVICE Visit visit(int i) const { return Visit::unpack(visits_.load(i)); }

 private:
  // Scheduled nodes below i, itself included: 0 for a prefix node without new descendants.
  SPECDEC_DEVICE int count_below(int i, int nodes, int prefix) const {
    const Shared<uint32_t>& above = i < 32 ? above_low_ : above_high_;
    int count = 0;
    uint32_t used_low = 0, used_high = 0;  // nodes with a new one below them
    for (int j = prefix; j < nodes; ++j) {
      used_low |= above_low_.load(j);
      used_high |= above_high_.load(j);
    }
    for (int j = i; j < nodes; ++j) {
      const uint32_t used = (j < 32 ? used_low : used_high) >> (j % 32) & 1;
      count += (above.load(j) >> (i % 32) & used) != 0;
    }
    return count;
  }

  Shared<int32_t> parent_;
  Shared<uint32_t> above_low_, above_high_;
  Shared<int32_t> size_, heavy_, before_, visits_;
};

}  // namespace specdec::cuda
