// Reading an accepted path: clamped lengths, and the identity where no node list is given.
#pragma once

#include "specdec/params.h"

namespace specdec::cpu::SPECDEC_ISA {

inline int64_t path_length(const PathView& path, int64_t b) {
  const int64_t length = path.lengths != nullptr ? path.lengths[b] : path.max_length;
  return length < 0 ? 0 : length > path.max_length ? path.max_length : length;
}

inline int64_t path_node(const PathView& path, int64_t b, int64_t i) {
  return path.path != nullptr ? path.path[b * path.max_length + i] : i;
}

}  // namespace specdec::cpu::SPECDEC_ISA
