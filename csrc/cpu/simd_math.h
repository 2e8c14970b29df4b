// Elementary functions on vectors. A scalar goes through lane 0 of the vector form, so that a number never
// depends on how many others were computed beside it.
#pragma once

#include "simd.h"

namespace specdec::cpu::SPECDEC_ISA {

typedef uint32_t VecBits __attribute__((vector_size(Vec::kWidth * 4)));

// e^x to about one unit in the last place: exactly 1 at 0, 0 below -104 (so at -inf), inf above 88.73, NaN at
// NaN. x = n ln 2 + r with |r| <= ln(2)/2; e^r by a degree-7 polynomial (Cephes expf).
inline Vec exp(Vec x) {
  // The clamp keeps n in range; a NaN is the second operand and passes through.
  x = min(Vec::set(90.0f), max(Vec::set(-106.0f), x));
  const Vec magic = Vec::set(0x1.8p23f);  // adding it leaves round(y) in the low bits
  const Vec shifted = x * Vec::set(0x1.715476p0f) + magic;
  const Vec n = shifted - magic;
  // ln 2 in two parts: n times the first is exact.
  Vec r = fma(n, Vec::set(-0.693359375f), x);
  r = fma(n, Vec::set(2.12194440e-4f), r);
  Vec p = Vec::set(1.9875691500e-4f);
  p = fma(p, r, Vec::set(1.3981999507e-3f));
  p = fma(p, r, Vec::set(8.3334519073e-3f));
  p = fma(p, r, Vec::set(4.1665795894e-2f));
  p = fma(p, r, Vec::set(1.6666665459e-1f));
  p = fma(p, r, Vec::set(5.0000001201e-1f));
  p = fma(p, r * r, r) + Vec::set(1.0f);
  // 2^n in two factors: n reaches -153 (subnormal results) and 130 (infinity), one factor holds -126..127.
  const VecBits bits = (VecBits)shifted.x - 0x4b400000u + 512u;  // n + 512, positive
  const VecBits half = bits >> 1;                                // (n + 512) / 2
  const VecBits lo = (half - (256u - 127u)) << 23;
  const VecBits hi = (bits - half - (256u - 127u)) << 23;
  Vec scale_lo, scale_hi;
  std::memcpy(&scale_lo.x, &lo, sizeof(lo));
  std::memcpy(&scale_hi.x, &hi, sizeof(hi));
  return p * scale_lo * scale_hi;
}

inline float lane0(Vec a) {
  float lanes[Vec::kWidth];
  a.store(lanes);
  return lanes[0];
}

inline float exp(float x) { return lane0(exp(Vec::set(x))); }

// ln(1 + t) for t in [0, 1], small t keeps its relative accuracy: 2 atanh(t / (2 + t)), whose argument is at
// most 1/3, by its series to degree 15 (remainder below 2^-28 of the value).
inline Vec log1p_unit(Vec t) {
  const Vec s = t / (Vec::set(2.0f) + t);
  const Vec s2 = s * s;
  Vec p = Vec::set(1.0f / 15.0f);
  p = fma(p, s2, Vec::set(1.0f / 13.0f));
  p = fma(p, s2, Vec::set(1.0f / 11.0f));
  p = fma(p, s2, Vec::set(1.0f / 9.0f));
  p = fma(p, s2, Vec::set(1.0f / 7.0f));
  p = fma(p, s2, Vec::set(1.0f / 5.0f));
  p = fma(p, s2, Vec::set(1.0f / 3.0f));
  const Vec twice = s + s;
  return fma(p * s2, twice, twice);
}

inline Vec sigmoid(Vec x) { return Vec::set(1.0f) / (Vec::set(1.0f) + exp(Vec::zero() - x)); }

inline Vec silu(Vec x) { return x / (Vec::set(1.0f) + exp(Vec::zero() - x)); }

// ln(1 + e^x) without overflow: max(x, 0) + ln(1 + e^-|x|).
inline Vec softplus(Vec x) {
  const Vec magnitude = max(x, Vec::zero() - x);
  return max(Vec::zero(), x) + log1p_unit(exp(Vec::zero() - magnitude));
}

}  // namespace specdec::cpu::SPECDEC_ISA
