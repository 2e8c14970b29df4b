// Buffers of one element type whose unset elements are NaN.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "specdec/types.h"

namespace specdec::test {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

inline float widen(const void* data, DType dtype, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  if (dtype == DType::kBFloat16) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
  }
  const int exponent = (bits >> 10) & 31;
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return bits & 0x3ff ? std::numeric_limits<float>::quiet_NaN() : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(bits & 0x3ff), -24);
  return sign * std::ldexp(static_cast<float>((bits & 0x3ff) | 0x400), exponent - 25);
}

// A buffer of elements of one dtype.
struct Buffer {
  DType dtype = DType::kFloat32;
  std::vector<float> f32;
  std::vector<uint16_t> half;

  Buffer() = default;
  Buffer(DType type, int64_t count) : dtype(type) {
    if (type == DType::kFloat32) {
      f32.assign(count, kNaN);
    } else {
      half.assign(count, 0x7fffu);  // NaN in both
    }
  }
  void* data() { return dtype == DType::kFloat32 ? static_cast<void*>(f32.data()) : half.data(); }
  const void* data() const {
    return dtype == DType::kFloat32 ? static_cast<const void*>(f32.data()) : half.data();
  }
  size_t bytes() const { return f32.size() * 4 + half.size() * 2; }
  double operator[](int64_t i) const { return widen(data(), dtype, i); }
  void set(int64_t i, float x) {
    if (dtype == DType::kFloat32) {
      f32[i] = x;
      return;
    }
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (dtype == DType::kBFloat16) {
      half[i] = static_cast<uint16_t>(bits >> 16);  // truncation: any representable number will do
    } else {
      const int exponent = static_cast<int>((bits >> 23) & 255) - 112;
      const uint32_t magnitude = exponent <= 0    ? 0u
                                 : exponent >= 31 ? (std::isnan(x) ? 0x7fffu : 0x7c00u)
                                                  : (exponent << 10) | ((bits >> 13) & 0x3ffu);
      half[i] = static_cast<uint16_t>(((bits >> 16) & 0x8000u) | magnitude);
    }
  }
  bool operator==(const Buffer& other) const { return f32 == other.f32 && half == other.half; }
};

inline bool same_bits(const Buffer& a, const Buffer& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data(), b.data(), a.bytes()) == 0;
}

}  // namespace specdec::test
