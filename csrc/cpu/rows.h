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
  if (count == Vec::kWidth / 2) {  // of a known size: no call
    std::memcpy(lanes, p, Vec::kWidth / 2 * sizeof(T));
  } else {
    std::memcpy(lanes, p, count * sizeof(T));
  }
  return Vec::load(lanes);
}

template <typename T>
inline void store_some(T* p, Vec a, int64_t count) {
  if (count == Vec::kWidth) return store(p, a);
  T lanes[Vec::kWidth];
  store(lanes, a);
  if (count == Vec::kWidth / 2) {
    std::memcpy(p, lanes, Vec::kWidth / 2 * sizeof(T));
  } else {
    std::memcpy(p, lanes, count * sizeof(T));
  }
}

// Halves by their own width: through memory, or masked, a store would not be forwarded to a load.
#if defined(__AVX512F__)
inline Vec load_some(const float* p, int64_t count) {
  if (count == Vec::kWidth / 2) return {_mm512_zextps256_ps512(_mm256_loadu_ps(p))};
  return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p)};
}
inline void store_some(float* p, Vec a, int64_t count) {
  if (count == Vec::kWidth / 2) return _mm256_storeu_ps(p, _mm512_castps512_ps256(a.x));
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), a.x);
}
#elif defined(__AVX2__)
inline Vec load_some(const float* p, int64_t count) {
  if (count == Vec::kWidth / 2) return {_mm256_zextps128_ps256(_mm_loadu_ps(p))};
  return load_some<float>(p, count);
}
inline void store_some(float* p, Vec a, int64_t count) {
  if (count == Vec::kWidth / 2) return _mm_storeu_ps(p, _mm256_castps256_ps128(a.x));
  store_some<float>(p, a, count);
}
#endif

// x [count] -> out, in float32.
inline void widen_row(DType dtype, const void* x, int64_t offset, int64_t count, float* out) {
  visit_dtype(dtype, [&](auto tag) {
    const auto* from = static_cast<const decltype(tag)*>(x) + offset;
    int64_t c = 0;
    for (; c + Vec::kWidth <= count; c += Vec::kWidth) Vec::load(from + c).store(out + c);
    for (; c < count; ++c) out[c] = to_float(from[c]);
  });
}

// out [count] <- x, rounded to its type.
inline void narrow_row(DType dtype, const float* x, int64_t count, void* out, int64_t offset) {
  visit_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    T* to = static_cast<T*>(out) + offset;
    int64_t c = 0;
    for (; c + Vec::kWidth <= count; c += Vec::kWidth) store(to + c, Vec::load(x + c));
    for (; c < count; ++c) to[c] = from_float<T>(x[c]);
  });
}

inline void clear_row(DType dtype, int64_t count, void* out, int64_t offset) {
  const int64_t size = dtype == DType::kFloat32 ? 4 : 2;
  std::memset(static_cast<char*>(out) + offset * size, 0, count * size);
}

// f(i, count) for the vectors of [0, n): count is the width, less for the last one.
template <typename F>
inline void for_vectors(int64_t n, F&& f) {
  for (int64_t i = 0; i < n; i += Vec::kWidth) f(i, std::min<int64_t>(Vec::kWidth, n - i));
}

}  // namespace specdec::cpu::SPECDEC_ISA
