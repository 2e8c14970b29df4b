// Which instances of the kernels on state tiles exist: for every state type and DK two kinds of gate and the
// tiles below. One file an instance of (kernel, state type, DK); files compile in parallel.
#pragma once

#include "state_tile.cuh"

namespace specdec::cuda {

constexpr int kNarrow = 16, kUsual = 32, kTall = 128;  // value rows of a tile; kNarrow for DK = 256 alone

template <bool kChannelGate, typename State, int kDK, int kRows>
using Tile = TileTraits<kChannelGate, State, kDK, kRows == kTall ? 256 : 128,
                        kRows == kTall    ? 4
                        : kRows == kUsual ? 2
                                          : 1>;

}  // namespace specdec::cuda

// SPECDEC_TILE_INSTANCES(Kernel, State, DK), inside namespace specdec::cuda.
#define SPECDEC_USUAL_TILE_INSTANCES(Kernel, State, DK)    \
  SPECDEC_INSTANCE(Kernel, Tile<false, State, DK, kUsual>) \
  SPECDEC_INSTANCE(Kernel, Tile<true, State, DK, kUsual>)
#define SPECDEC_TILE_INSTANCES(Kernel, State, DK)         \
  SPECDEC_USUAL_TILE_INSTANCES(Kernel, State, DK)         \
  SPECDEC_INSTANCE(Kernel, Tile<false, State, DK, kTall>) \
  SPECDEC_INSTANCE(Kernel, Tile<true, State, DK, kTall>)
#define SPECDEC_NARROW_TILE_INSTANCES(Kernel, State, DK)    \
  SPECDEC_INSTANCE(Kernel, Tile<false, State, DK, kNarrow>) \
  SPECDEC_INSTANCE(Kernel, Tile<true, State, DK, kNarrow>)
