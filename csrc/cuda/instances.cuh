// Which instances of the kernels on state tiles exist: for every state type and DK two kinds of gate with the
// usual tile, and the other tiles below. One file for a kernel and state type.
#pragma once

#include "state_tile.cuh"

namespace specdec::cuda {

constexpr int kNarrow = 16, kUsual = 32, kTall = 128;  // value rows of a tile
constexpr bool has_narrow(int DK) { return DK == 256; }
// Where models are: elsewhere it is not worth its compile time. With a gate per channel DK = 256 spills.
constexpr bool has_tall(bool channel_gate, int DK) {
  return DK == 64 || DK == 128 || (DK == 256 && !channel_gate);
}

template <bool kChannelGate, typename State, int kDK, int kRows>
using Tile = TileTraits<kChannelGate, State, kDK, kRows == kTall ? 256 : 128,
                        kRows == kTall    ? 4
                        : kRows == kUsual ? 2
                                          : 1>;

}  // namespace specdec::cuda

// SPECDEC_..._TILE_INSTANCES(Kernel, State, DK), inside namespace specdec::cuda.
#define SPECDEC_ROWS_TILE_INSTANCES(Kernel, State, DK, kRows) \
  SPECDEC_INSTANCE(Kernel, Tile<false, State, DK, kRows>)     \
  SPECDEC_INSTANCE(Kernel, Tile<true, State, DK, kRows>)
#define SPECDEC_USUAL_TILE_INSTANCES(Kernel, State, DK) SPECDEC_ROWS_TILE_INSTANCES(Kernel, State, DK, kUsual)
#define SPECDEC_TALL_TILE_INSTANCES(Kernel, State, DK) SPECDEC_ROWS_TILE_INSTANCES(Kernel, State, DK, kTall)
#define SPECDEC_NARROW_TILE_INSTANCES(Kernel, State, DK) \
  SPECDEC_ROWS_TILE_INSTANCES(Kernel, State, DK, kNarrow)
