// What the entry points of kernels on state tiles share.
#pragma once

#include "instances.cuh"
#include "kernel.h"
#include "specdec/params.h"

namespace specdec::cuda {

// What every GPU of compute capability 8.0, 9.0 or 10.0 can give a block.
constexpr int64_t kSharedLimit = 163 << 10;
// Blocks that keep any GPU busy: below, tiles are made smaller.
constexpr int64_t kEnoughBlocks = 128;
constexpr int64_t kMaxBlocks = INT32_MAX;

template <typename T>
struct Tag {
  using Type = T;
};

// What all kernels on state tiles ask of the recurrence and of the state.
inline Status check_state(const Recurrence& rec, const StateView& state, int64_t B) {
  if (rec.HK <= 0 || rec.HV % rec.HK != 0) return Status::kInvalidArgument;
  if (rec.DV % kUsual != 0) return Status::kUnsupported;
  const int64_t size = state.dtype == DType::kFloat32 ? 4 : 2;
  if (reinterpret_cast<uintptr_t>(state.data) % 16 != 0 || state.slot_stride * size % 16 != 0) {
    return Status::kUnsupported;
  }
  return B * rec.HV * (rec.DV / kNarrow) > kMaxBlocks ? Status::kUnsupported : Status::kOk;
}

// The same traits with another tile.
template <typename T, int kRows>
using WithRows = Tile<T::kChannelGate, typename T::State, T::kDK, kRows>;

// Are tall tiles possible, and enough of them?
inline bool tall_tiles(const Recurrence& rec, int64_t B) {
  return rec.DV % kTall == 0 && B * rec.HV * (rec.DV / kTall) >= kEnoughBlocks;
}

}  // namespace specdec::cuda
