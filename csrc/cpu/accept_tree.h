// A round's candidates of one sequence, and its outcome.
#pragma once

#include <algorithm>

#include "simd.h"
#include "specdec/acceptance_params.h"
#include "specdec/sequences.h"

namespace specdec::cpu::SPECDEC_ISA {

struct DraftTree {
  const int64_t* tokens = nullptr;   // [length]
  const int32_t* parents = nullptr;  // [length]; null: a chain
  int64_t length = 0;

  DraftTree(const DraftView& draft, int64_t b, int64_t N)
      : tokens(draft.tokens + b * N),
        parents(draft.parents != nullptr ? draft.parents + b * N : nullptr),
        length(valid_length(draft.lengths, b, N)) {}

  int parent(int64_t node) const { return parents != nullptr ? parents[node] : static_cast<int>(node) - 1; }
};

// The path that ends at `leaf`, and the token after it.
inline void write_outcome(const AcceptedView& out, int64_t b, const DraftTree& tree, int leaf,
                          int64_t next_token) {
  int32_t length = 0;
  for (int node = leaf; node >= 0; node = tree.parent(node)) ++length;
  int32_t* path = out.path + b * out.max_length;
  for (int64_t i = length; i < out.max_length; ++i) path[i] = 0;
  int node = leaf;
  for (int32_t i = length; i-- > 0; node = tree.parent(node)) path[i] = node;
  out.path_lengths[b] = length;
  out.next_token[b] = next_token;
}

inline void write_absent(const AcceptedView& out, int64_t b) {
  std::fill_n(out.path + b * out.max_length, out.max_length, 0);
  out.path_lengths[b] = 0;
  out.next_token[b] = 0;
}

}  // namespace specdec::cpu::SPECDEC_ISA
