// Slots, lengths, parents and paths lie on the device, where nobody checks them before a launch. What is out
// of range is made harmless where it is read: no walk goes on forever, no access leaves its buffer.
#pragma once

#include "primitives.cuh"
#include "specdec/params.h"

namespace specdec::cuda {

// The slot of row b in a pool of `pool`; negative, as of padding, where there is no such slot.
SPECDEC_DEVICE int64_t slot_of(const int32_t* slots, int64_t b, int64_t pool) {
  const int64_t slot = slots != nullptr ? Global<const int32_t>(slots).load(b) : b;
  return slot < pool ? slot : -1;
}

// A length read from memory, in [0, most].
SPECDEC_DEVICE int length_of(const int32_t* lengths, int64_t b, int64_t most) {
  const int64_t length = lengths != nullptr ? Global<const int32_t>(lengths).load(b) : most;
  return static_cast<int>(length < 0 ? 0 : length > most ? most : length);
}

// What was given as the parent of node `id`: a root where it is no earlier node.
SPECDEC_DEVICE int parent_of(int given, int id) { return given < id && given >= 0 ? given : -1; }

// Of a path into `nodes` nodes, each of which it names at most once.
SPECDEC_DEVICE int path_length(const PathView& path, int64_t b, int64_t nodes) {
  return length_of(path.lengths, b, path.max_length < nodes ? path.max_length : nodes);
}

// What was given as a node of a path: the nearest that exists. `nodes` is positive.
SPECDEC_DEVICE int path_node(int given, int64_t nodes) {
  return given < 0 ? 0 : given < nodes ? given : static_cast<int>(nodes) - 1;
}

}  // namespace specdec::cuda
