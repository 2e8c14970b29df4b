// Walking the rows of a tensor, and along a row.
//
// A length need not be a multiple of the vector width: the tail runs through the same vector code on padded
// lanes, so that an element's bits do not depend on where in a row it stands.
#pragma once

#include <algorithm>

#include "simd.h"
#include "specdec/dense_params.h"

namespace specdec::cpu::SPECDEC_ISA {

template <typename T>
inline const T* row_of(const RowsView& rows, int64_t row) {
  return static_cast<const T*>(rows.data) + row / rows.inner * rows.stride_outer +
         row % rows.inner * rows.stride_inner;
}

// The first `count` elements at p, zeros in the other lanes.
template <typename T>
inline Vec load_some(const T* p, int64_t count) {
  if (count == Vec::kWidth) return Vec::load(p);
  T lanes[Vec::kWidth] = {};
  std::memcpy(lanes, p, count * sizeof(T));
  return Vec::load(lanes);
}

template <typename T>
inline void store_some(T* p, Vec a, int64_t count) {
  if (count == Vec::kWidth) return store(p, a);
  T lanes[Vec::kWidth];
  store(lanes, a);
  std::memcpy(p, lanes, count * sizeof(T));
}

// f(i, count) for the vectors of [0, n): count is the width, less for the last one.
template <typename F>
inline void for_vectors(int64_t n, F&& f) {
  for (int64_t i = 0; i < n; i += Vec::kWidth) f(i, std::min<int64_t>(Vec::kWidth, n - i));
}

}  // namespace specdec::cpu::SPECDEC_ISA
