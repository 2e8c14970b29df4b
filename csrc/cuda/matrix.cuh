// Products of small matrices on tensor cores, from float32 operands in shared memory, in a named precision.
//
// The unit is a tile of 16 x 8 with 16 terms. An operand is read with scalar loads at any strides, so that
// one routine serves a matrix and its transpose; rows of 4 (mod 32) or 8 (mod 32) floats make the loads free
// of bank conflicts along either side.
#pragma once

#include "specdec/types.h"
#include "tensor_cores.cuh"

namespace specdec::cuda {

struct FragmentA {  // 16 x 16
  float x[2][4];
};
struct FragmentB {  // 16 x 8
  float x[2][2];
};

// Element (i, k) lies at `at` + i * row + k * term.
SPECDEC_DEVICE FragmentA fragment_a(const Shared<float>& s, int at, int row, int term) {
  const Shared<float> from = s + (at + lane() / 4 * row + lane() % 4 * term);
  FragmentA a;
  SPECDEC_UNROLL
  for (int h = 0; h < 2; ++h) {
    SPECDEC_UNROLL
    for (int r = 0; r < 4; ++r) a.x[h][r] = from.load(r % 2 * 8 * row + (h * 8 + r / 2 * 4) * term);
  }
  return a;
}

// Element (k, j) lies at `at` + k * term + j * column.
SPECDEC_DEVICE FragmentB fragment_b(const Shared<float>& s, int at, int term, int column) {
  const Shared<float> from = s + (at + lane() % 4 * term + lane() / 4 * column);
  FragmentB b;
  SPECDEC_UNROLL
  for (int h = 0; h < 2; ++h) {
    SPECDEC_UNROLL
    for (int r = 0; r < 2; ++r) b.x[h][r] = from.load((h * 8 + r * 4) * term);
  }
  return b;
}

// A 16 x 8 sum: this lane's elements are (sum_row(r), sum_column(r)), r = 0 to 3.
SPECDEC_DEVICE int sum_row(int r) { return lane() / 4 + r / 2 * 8; }
SPECDEC_DEVICE int sum_column(int r) { return lane() % 4 * 2 + r % 2; }

// d += a b.
template <Precision kPrecision>
SPECDEC_DEVICE void multiply_add(float (&d)[4], const FragmentA& a, const FragmentB& b) {
  static_assert(kPrecision != Precision::kIeee);
  if constexpr (kPrecision == Precision::kBf16) {
    // The 16 terms may come in any order as long as both operands agree: the pairs are terms t and t + 4.
    const uint32_t left[4] = {pack_bf16(a.x[0][0], a.x[0][2]), pack_bf16(a.x[0][1], a.x[0][3]),
                              pack_bf16(a.x[1][0], a.x[1][2]), pack_bf16(a.x[1][1], a.x[1][3])};
    const uint32_t right[2] = {pack_bf16(b.x[0][0], b.x[0][1]), pack_bf16(b.x[1][0], b.x[1][1])};
    mma_bf16(d, left, right);
  } else {
    SPECDEC_UNROLL
    for (int h = 0; h < 2; ++h) {
      float a_high[4], b_high[2];
      SPECDEC_UNROLL
      for (int r = 0; r < 4; ++r) a_high[r] = to_tf32(a.x[h][r]);
      SPECDEC_UNROLL
      for (int r = 0; r < 2; ++r) b_high[r] = to_tf32(b.x[h][r]);
      if constexpr (kPrecision == Precision::kTf32x3) {
        // x = high + low up to 2^-22 x; the product of the low parts is as small and left out. Small terms
        // first.
        float a_low[4], b_low[2];
        SPECDEC_UNROLL
        for (int r = 0; r < 4; ++r) a_low[r] = to_tf32(a.x[h][r] - a_high[r]);
        SPECDEC_UNROLL
        for (int r = 0; r < 2; ++r) b_low[r] = to_tf32(b.x[h][r] - b_high[r]);
        mma_tf32(d, a_low, b_high);
        mma_tf32(d, a_high, b_low);
      }
      mma_tf32(d, a_high, b_high);
    }
  }
}

}  // namespace specdec::cuda
