// 16-bit floating-point numbers on the host, bit for bit what the GPU's conversions give.
#pragma once

#include <cstdint>
#include <cstring>

namespace specdec::simt {

struct bfloat16 {
  uint16_t bits;
};

struct half {
  uint16_t bits;
};

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

inline float to_float(bfloat16 x) { return float_of_bits(static_cast<uint32_t>(x.bits) << 16); }

inline bfloat16 to_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};  // NaN, as cvt.rn.bf16.f32 writes it
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

inline float to_float(half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // A half's bits, moved to a float's place, are 2^112 too small, subnormals included.
  const float value = float_of_bits(magnitude << 13) * 0x1p112f;
  return float_of_bits(sign | bits_of(value));
}

inline half to_half(float x) {
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u;
  const float magnitude = float_of_bits(bits & 0x7fffffffu);
  if (magnitude != magnitude) return {0x7fff};  // as cvt.rn.f16.f32 writes it
  // 65520 is half way between the largest half and what would come after it.
  if (magnitude >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x1p-14f) {
    // Adding 0.5 puts the unit of a subnormal, 2^-24, on the last bit of the sum: the addition rounds.
    return {static_cast<uint16_t>(sign | (bits_of(magnitude + 0.5f) - bits_of(0.5f)))};
  }
  const uint32_t rounded = bits_of(magnitude) + 0xfffu + (bits >> 13 & 1u);
  return {static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)))};
}

}  // namespace specdec::simt
