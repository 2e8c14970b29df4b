// What a call holds for one of its sequences: slot, valid length, accepted path. Null arrays are the
// identity, lengths are clamped to what the tensors hold.
#pragma once

#include "specdec/params.h"

namespace specdec {

// Negative: padding, to be skipped.
inline int64_t slot_of(const int32_t* slots, int64_t b) { return slots != nullptr ? slots[b] : b; }

inline int64_t valid_length(const int32_t* lengths, int64_t b, int64_t most) {
  if (lengths == nullptr) return most;
  return lengths[b] < 0 ? 0 : lengths[b] > most ? most : lengths[b];
}

// Of a path into `nodes` nodes, each of which it names at most once.
inline int64_t path_length(const PathView& path, int64_t b, int64_t nodes) {
  const int64_t length = valid_length(path.lengths, b, path.max_length);
  return length < nodes ? length : nodes;
}

inline int64_t path_node(const PathView& path, int64_t b, int64_t i) {
  return path.path != nullptr ? path.path[b * path.max_length + i] : i;
}

}  // namespace specdec
