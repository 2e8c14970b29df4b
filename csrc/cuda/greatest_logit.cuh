// The greatest logit of a row, and 64-bit numbers between the lanes of a warp.
#pragma once

#include "primitives.cuh"
#include "specdec/sampling_math.h"

namespace specdec::cuda {

// A logit and its token as one number: of two the larger is the larger logit, at equal logits the smaller
// token. NaN is larger than all numbers.
SPECDEC_DEVICE uint64_t greatest_key(float x, int64_t token) {
  return static_cast<uint64_t>(rank_or_nan(x)) << 32 | (0xffffffffu - static_cast<uint32_t>(token));
}
SPECDEC_DEVICE uint32_t rank_of_key(uint64_t key) { return static_cast<uint32_t>(key >> 32); }
SPECDEC_DEVICE uint32_t token_of_key(uint64_t key) { return 0xffffffffu - static_cast<uint32_t>(key); }

SPECDEC_DEVICE uint64_t larger_key(uint64_t a, uint64_t b) { return a > b ? a : b; }

SPECDEC_DEVICE uint64_t shuffle_xor_64(uint64_t x, int mask) {
  const uint32_t high = shuffle_xor(static_cast<uint32_t>(x >> 32), mask);
  return static_cast<uint64_t>(high) << 32 | shuffle_xor(static_cast<uint32_t>(x), mask);
}

// The largest of a warp; every lane gets it.
SPECDEC_DEVICE uint64_t largest_of_warp(uint64_t key) {
  SPECDEC_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) key = larger_key(key, shuffle_xor_64(key, mask));
  return key;
}

}  // namespace specdec::cuda
