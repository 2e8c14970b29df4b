// Horizontal sums of many vectors at once. Every sum adds its lanes in the order of hsum, so a row gets the
// same bits whether it is reduced alone or with its neighbours.
#pragma once

#include "simd.h"

namespace specdec::cpu::SPECDEC_ISA {

#if defined(__AVX512F__)

namespace detail {
inline __m512 fold_halves(__m512 a, __m512 b) {  // [a.lo + a.hi | b.lo + b.hi]
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}
inline __m512 fold_quarters(__m512 a, __m512 b) {  // four 128-bit lanes, one an input vector
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
inline __m512 fold_pairs(__m512 a, __m512 b) {  // in every 128-bit lane: elements 0 + 2 and 1 + 3
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}
inline __m512 fold_singles(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}
inline __m512 fold_four(const Vec* v, int i) {  // lane j: v[4 j + i] folded to four elements
  return fold_quarters(fold_halves(v[i].x, v[4 + i].x), fold_halves(v[8 + i].x, v[12 + i].x));
}
}  // namespace detail

// Lane i of the result is hsum(v[i]).
SPECDEC_INLINE Vec hsum_all(const Vec (&v)[16]) {
  using namespace detail;
  const __m512 a = fold_pairs(fold_four(v, 0), fold_four(v, 1));
  const __m512 b = fold_pairs(fold_four(v, 2), fold_four(v, 3));
  return {fold_singles(a, b)};
}

inline Vec swap_halves(Vec a) { return {_mm512_shuffle_f32x4(a.x, a.x, 0x4e)}; }

#elif defined(__AVX2__)

namespace detail {
inline __m256 fold_halves(__m256 a, __m256 b) {
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
inline __m256 fold_pairs(__m256 a, __m256 b) {
  return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
}
inline __m256 fold_singles(__m256 a, __m256 b) {
  return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
}
}  // namespace detail

SPECDEC_INLINE Vec hsum_all(const Vec (&v)[8]) {
  using namespace detail;
  const __m256 a = fold_pairs(fold_halves(v[0].x, v[4].x), fold_halves(v[1].x, v[5].x));
  const __m256 b = fold_pairs(fold_halves(v[2].x, v[6].x), fold_halves(v[3].x, v[7].x));
  return {fold_singles(a, b)};
}

inline Vec swap_halves(Vec a) { return {_mm256_permute2f128_ps(a.x, a.x, 0x01)}; }

#else

SPECDEC_INLINE Vec hsum_all(const Vec (&v)[8]) {
  Vec out;
  for (int i = 0; i < 8; ++i) out.x[i] = hsum(v[i]);
  return out;
}

inline Vec swap_halves(Vec a) {
  Vec out;
  for (int i = 0; i < 8; ++i) out.x[i] = a.x[(i + 4) % 8];
  return out;
}

#endif

}  // namespace specdec::cpu::SPECDEC_ISA
