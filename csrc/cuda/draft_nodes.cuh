// The nodes of a round's candidates, made harmless as they are read (device_values.cuh).
#pragma once

#include "device_values.cuh"
#include "specdec/acceptance_params.h"

namespace specdec::cuda {

constexpr int kMaxAcceptNodes = 4096;  // N

SPECDEC_DEVICE int draft_length(const DraftView& draft, int64_t b, int64_t N) {
  return length_of(draft.lengths, b, N);
}

SPECDEC_DEVICE int draft_parent(const DraftView& draft, int64_t b, int64_t N, int node) {
  if (draft.parents == nullptr) return node - 1;
  return parent_of(Global<const int32_t>(draft.parents).load(b * N + node), node);
}

}  // namespace specdec::cuda
