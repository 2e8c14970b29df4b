// One vector type, three instruction sets. A kernel file includes this header and is compiled once per
// instruction set with SPECDEC_ISA defined to `avx512`, `avx2` or `portable`; everything lives in a namespace
// of that name, so that the linker can never merge an AVX-512 copy of a function into the path of a machine
// without it. Contraction is off (-ffp-contract=off): a multiply-add is fused exactly where `fma` is written.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "specdec/types.h"

#if defined(__AVX512F__) || defined(__AVX2__)
// GCC 12 takes _mm512_undefined_ps inside its own header for a mistake of ours (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#ifndef SPECDEC_ISA
#error "kernel files are built through SPECDEC_CPU_KERNELS (CMakeLists.txt), which defines SPECDEC_ISA"
#endif

// Where a call would pass its vectors through memory.
#define SPECDEC_INLINE inline __attribute__((always_inline))

namespace specdec::cpu::SPECDEC_ISA {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// --- scalar conversions: round to nearest even, NaN stays NaN ---

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline float to_float(f16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  uint32_t bits;
  if (magnitude >= 0x7c00u) {
    bits = sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13);
  } else {
    // 2^112 rebases the exponent; the product is exact for subnormals too.
    const uint32_t shifted = magnitude << 13;
    float value;
    std::memcpy(&value, &shifted, 4);
    value *= 0x1p112f;
    std::memcpy(&bits, &value, 4);
    bits |= sign;
  }
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

template <typename T>
inline T from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

template <>
inline bf16 from_float<bf16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{static_cast<uint16_t>((bits >> 16) | 0x40u)};
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return bf16{static_cast<uint16_t>(bits >> 16)};
}

template <>
inline f16 from_float<f16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return f16{static_cast<uint16_t>(sign | 0x7e00u)};
  if (bits >= 0x477ff000u) return f16{static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to infinity
  if (bits < 0x38800000u) {
    // Adding 0.5 puts the unit of a half subnormal, 2^-24, on the last bit of the sum: the addition rounds.
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return f16{static_cast<uint16_t>(sign | (bits - 0x3f000000u))};
  }
  bits += 0xc8000fffu + ((bits >> 13) & 1u);  // rebase the exponent by -112 and round
  return f16{static_cast<uint16_t>(sign | (bits >> 13))};
}

// --- vectors ---

#if defined(__AVX512F__)

struct Vec {
  static constexpr int kWidth = 16;
  __m512 x;

  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec set(float a) { return {_mm512_set1_ps(a)}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load(const bf16* p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
  }
  static Vec load(const f16* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, x); }
};

inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.x, b.x)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.x, b.x)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.x, b.x)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.x, b.x)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.x, b.x)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.x, b.x)}; }
inline float hsum(Vec a) {
  const __m256 lo = _mm512_castps512_ps256(a.x);
  const __m256 hi = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.x), 1));
  const __m256 s8 = _mm256_add_ps(lo, hi);
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }

#elif defined(__AVX2__)

struct Vec {
  static constexpr int kWidth = 8;
  __m256 x;

  static Vec zero() { return {_mm256_setzero_ps()}; }
  static Vec set(float a) { return {_mm256_set1_ps(a)}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec load(const bf16* p) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16))};
  }
  static Vec load(const f16* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  void store(float* p) const { _mm256_storeu_ps(p, x); }
};

inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.x, b.x)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.x, b.x)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.x, b.x)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.x, b.x)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.x, b.x, c.x)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.x, b.x)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.x, b.x)}; }
inline float hsum(Vec a) {
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(a.x), _mm256_extractf128_ps(a.x, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }

#else

// GCC and Clang lower this vector to whatever the target has (SSE2, NEON).
struct Vec {
  static constexpr int kWidth = 8;
  typedef float Raw __attribute__((vector_size(32), aligned(4)));
  Raw x;

  static Vec zero() { return set(0.0f); }
  static Vec set(float a) { return {Raw{a, a, a, a, a, a, a, a}}; }
  static Vec load(const float* p) {
    Vec out;
    std::memcpy(&out.x, p, sizeof(Raw));
    return out;
  }
  template <typename T>
  static Vec load(const T* p) {
    Vec out;
    for (int i = 0; i < kWidth; ++i) out.x[i] = to_float(p[i]);
    return out;
  }
  void store(float* p) const { std::memcpy(p, &x, sizeof(Raw)); }
};

inline Vec operator+(Vec a, Vec b) { return {a.x + b.x}; }
inline Vec operator-(Vec a, Vec b) { return {a.x - b.x}; }
inline Vec operator*(Vec a, Vec b) { return {a.x * b.x}; }
inline Vec operator/(Vec a, Vec b) { return {a.x / b.x}; }
#if defined(__aarch64__)
inline Vec fma(Vec a, Vec b, Vec c) {
  Vec out;
  for (int i = 0; i < Vec::kWidth; ++i) out.x[i] = __builtin_fmaf(a.x[i], b.x[i], c.x[i]);
  return out;
}
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
// Without a fused instruction std::fma is a slow library call: multiply and add, in scalars as in vectors.
inline Vec fma(Vec a, Vec b, Vec c) { return {a.x * b.x + c.x}; }
inline float fma(float a, float b, float c) { return a * b + c; }
#endif
inline Vec max(Vec a, Vec b) { return {a.x > b.x ? a.x : b.x}; }
inline Vec min(Vec a, Vec b) { return {a.x < b.x ? a.x : b.x}; }
inline float hsum(Vec a) {
  float s[4];
  for (int i = 0; i < 4; ++i) s[i] = a.x[i] + a.x[i + 4];
  return (s[0] + s[2]) + (s[1] + s[3]);
}

#endif

inline void store(float* p, Vec a) { a.store(p); }

inline void store(bf16* p, Vec a) {
  float lanes[Vec::kWidth];
  a.store(lanes);
  for (int i = 0; i < Vec::kWidth; ++i) p[i] = from_float<bf16>(lanes[i]);
}

inline void store(f16* p, Vec a) {
  float lanes[Vec::kWidth];
  a.store(lanes);
  for (int i = 0; i < Vec::kWidth; ++i) p[i] = from_float<f16>(lanes[i]);
}

// Calls f with a value of the element type that `dtype` names:
//   visit_dtype(p.dtype, [&](auto tag) { using T = decltype(tag); ... })
template <typename F>
inline auto visit_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBFloat16:
      return f(bf16{});
    case DType::kFloat16:
      return f(f16{});
    case DType::kFloat32:
      break;
  }
  return f(float{});
}

}  // namespace specdec::cpu::SPECDEC_ISA
