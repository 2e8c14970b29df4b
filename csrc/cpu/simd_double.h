// float64 on the vectors of simd.h: a Vec widens to two Doubles. Comparisons as masks of bits.
#pragma once

#include "simd.h"

namespace specdec::cpu::SPECDEC_ISA {

struct Doubles {
  static constexpr int kWidth = Vec::kWidth / 2;
#if defined(__AVX512F__)
  typedef __m512d Raw;
#elif defined(__AVX2__)
  typedef __m256d Raw;
#else
  typedef double Raw __attribute__((vector_size(32), aligned(8)));
#endif
  Raw x;

  static Doubles set(double a) { return {a - Raw{}}; }
  static Doubles load(const double* p) {
    Doubles loaded;
    std::memcpy(&loaded.x, p, sizeof(Raw));
    return loaded;
  }
  void store(double* p) const { std::memcpy(p, &x, sizeof(Raw)); }
};

inline Doubles operator+(Doubles a, Doubles b) { return {a.x + b.x}; }
inline Doubles operator-(Doubles a, Doubles b) { return {a.x - b.x}; }
inline Doubles operator*(Doubles a, Doubles b) { return {a.x * b.x}; }
// Both take b where the comparison fails, as for a NaN.
inline Doubles larger(Doubles a, Doubles b) { return {a.x > b.x ? a.x : b.x}; }
inline Doubles smaller(Doubles a, Doubles b) { return {a.x < b.x ? a.x : b.x}; }

struct DoublePair {
  Doubles low, high;
};

#if defined(__AVX512F__)

inline DoublePair widen(Vec a) {
  return {{_mm512_cvtps_pd(_mm512_castps512_ps256(a.x))},
          {_mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.x), 1)))}};
}
// Bit i: a[i] > b[i].
inline uint32_t greater_bits(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.x, b.x, _CMP_GT_OQ); }
// Bit i: a[i] or b[i] is a NaN.
inline uint32_t nan_bits(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.x, b.x, _CMP_UNORD_Q); }

#elif defined(__AVX2__)

inline DoublePair widen(Vec a) {
  return {{_mm256_cvtps_pd(_mm256_castps256_ps128(a.x))}, {_mm256_cvtps_pd(_mm256_extractf128_ps(a.x, 1))}};
}
inline uint32_t greater_bits(Vec a, Vec b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.x, b.x, _CMP_GT_OQ)));
}
inline uint32_t nan_bits(Vec a, Vec b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.x, b.x, _CMP_UNORD_Q)));
}

#else

inline DoublePair widen(Vec a) {
  DoublePair out;
  for (int i = 0; i < Doubles::kWidth; ++i) {
    out.low.x[i] = static_cast<double>(a.x[i]);
    out.high.x[i] = static_cast<double>(a.x[i + Doubles::kWidth]);
  }
  return out;
}
inline uint32_t greater_bits(Vec a, Vec b) {
  uint32_t bits = 0;
  for (int i = 0; i < Vec::kWidth; ++i) bits |= static_cast<uint32_t>(a.x[i] > b.x[i]) << i;
  return bits;
}
inline uint32_t nan_bits(Vec a, Vec b) {
  uint32_t bits = 0;
  for (int i = 0; i < Vec::kWidth; ++i) {
    bits |= static_cast<uint32_t>(a.x[i] != a.x[i] || b.x[i] != b.x[i]) << i;
  }
  return bits;
}

#endif

}  // namespace specdec::cpu::SPECDEC_ISA
