// Tokens of a call of verify or prefill as the solve reads them: elements of a dtype known at run time, rows
// to float32 in shared memory, keys and queries as the recurrence uses them.
#pragma once

#include "primitives.cuh"
#include "specdec/params.h"

namespace specdec::cuda {

// Elements of a tensor. Kernels of the solve choose the dtype at run time: its cost is that of one branch a
// load, and the instances are a third.
class Elements {
 public:
  SPECDEC_DEVICE Elements(const void* data, DType dtype)
      : f32_(static_cast<const float*>(data)),
        bf16_(static_cast<const bfloat16*>(data)),
        f16_(static_cast<const half*>(data)),
        dtype_(dtype),
        aligned_(reinterpret_cast<uintptr_t>(data) % (dtype == DType::kFloat32 ? 16 : 8) == 0) {}

  SPECDEC_DEVICE bool is_float() const { return dtype_ == DType::kFloat32; }
  SPECDEC_DEVICE const Global<const float>& floats() const { return f32_; }

  // Whether every fourth element of every row may be loaded with its three neighbours.
  SPECDEC_DEVICE bool aligned(const Strides& s) const {
    return aligned_ && s.b % 4 == 0 && s.n % 4 == 0 && s.h % 4 == 0;
  }

  SPECDEC_DEVICE float load(int64_t i) const {
    if (dtype_ == DType::kFloat32) return f32_.load(i);
    return dtype_ == DType::kBFloat16 ? float_of(bf16_.load(i)) : float_of(f16_.load(i));
  }
  // Elements i and i + 1, in one access where `aligned`.
  SPECDEC_DEVICE Pack<float, 2> load2(int64_t i, bool aligned) const {
    if (!aligned) return {{load(i), load(i + 1)}};
    if (dtype_ == DType::kFloat32) return f32_.template load_vec<2>(i);
    if (dtype_ == DType::kBFloat16) {
      const Pack<bfloat16, 2> x = bf16_.template load_vec<2>(i);
      return {{float_of(x[0]), float_of(x[1])}};
    }
    const Pack<half, 2> x = f16_.template load_vec<2>(i);
    return {{float_of(x[0]), float_of(x[1])}};
  }
  // Elements i to i + 3 of a 16-bit dtype as they are, in one access where `aligned`, and their values.
  SPECDEC_DEVICE Pack<bfloat16, 4> load_narrow(int64_t i) const { return bf16_.template load_vec<4>(i); }
  SPECDEC_DEVICE Pack<float, 4> widen(const Pack<bfloat16, 4>& x) const {
    if (dtype_ == DType::kBFloat16) return {{float_of(x[0]), float_of(x[1]), float_of(x[2]), float_of(x[3])}};
    Pack<half, 4> y;
    __builtin_memcpy(&y, &x, sizeof(y));
    return {{float_of(y[0]), float_of(y[1]), float_of(y[2]), float_of(y[3])}};
  }

 private:
  Global<const float> f32_;
  Global<const bfloat16> bf16_;
  Global<const half> f16_;
  DType dtype_;
  bool aligned_;
};

// The output of a call, contiguous [.., DV].
class OutElements {
 public:
  SPECDEC_DEVICE OutElements(void* data, DType dtype)
      : f32_(static_cast<float*>(data)),
        bf16_(static_cast<bfloat16*>(data)),
        f16_(static_cast<half*>(data)),
        dtype_(dtype) {}

  // Elements i and i + 1; i is even.
  SPECDEC_DEVICE void store2(int64_t i, float x, float y) const {
    if (dtype_ == DType::kFloat32) {
      f32_.store_vec<2>(i, {{x, y}});
    } else if (dtype_ == DType::kBFloat16) {
      bf16_.store_vec<2>(i, {{round_to<bfloat16>(x), round_to<bfloat16>(y)}});
    } else {
      f16_.store_vec<2>(i, {{round_to<half>(x), round_to<half>(y)}});
    }
  }

 private:
  Global<float> f32_;
  Global<bfloat16> bf16_;
  Global<half> f16_;
  DType dtype_;
};

SPECDEC_HOST_DEVICE int64_t at_token(const Strides& s, int64_t b, int64_t n, int64_t h) {
  return b * s.b + n * s.n + h * s.h;
}

SPECDEC_HOST_DEVICE bool is_finite(float x) { return x - x == 0.0f; }

// Sum over the lanes of the warp, the same in all of them.
SPECDEC_DEVICE float warp_sum(float x) {
  SPECDEC_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}

// A row of DK floats lies in a warp as quads: lane l has the columns 4 l to 4 l + 3 and those 128 further.
constexpr int kQuads = 2;  // DK is at most 256

// Rows [first, first + count) of one head, to `to` [rows, ld] in float32 as they are; rows from `count` on
// are zero. `rows` is a multiple of 16. Where nothing is to be widened the copies are asynchronous, to be
// committed and waited for; each lane reads back what it has copied itself.
template <int kWarps>
SPECDEC_DEVICE void stage_rows(const Elements& from, const Strides& stride, int64_t b, int64_t first,
                               int64_t head, int count, int rows, int DK, const Shared<float>& to, int ld) {
  constexpr int kBatch = 4;  // rows whose loads are under way together
  const bool aligned = from.aligned(stride);
  SPECDEC_ROLL
  for (int c = 4 * lane(); c < DK; c += 128) {
    const int64_t at = at_token(stride, b, first, head) + c;
    SPECDEC_ROLL
    for (int begin = warp(); begin < rows; begin += kBatch * kWarps) {
      if (aligned && !from.is_float()) {
        Pack<bfloat16, 4> x[kBatch];
        SPECDEC_UNROLL
        for (int i = 0; i < kBatch; ++i) {
          const int r = begin + i * kWarps;
          x[i] = r < count ? from.load_narrow(at + r * stride.n) : Pack<bfloat16, 4>{};
        }
        SPECDEC_UNROLL
        for (int i = 0; i < kBatch; ++i) {
          to.store_vec<4>((begin + i * kWarps) * ld + c, from.widen(x[i]));
        }
        continue;
      }
      SPECDEC_ROLL
      for (int r = begin; r < begin + kBatch * kWarps; r += kWarps) {
        const int64_t row = at + (r < count ? r : 0) * stride.n;
        if (aligned) {
          copy_async<4>(to, r * ld + c, from.floats(), row, r < count);
        } else {
          Pack<float, 4> x{};
          if (r < count) x = {{from.load(row), from.load(row + 1), from.load(row + 2), from.load(row + 3)}};
          to.store_vec<4>(r * ld + c, x);
        }
      }
    }
  }
}

// What a warp does with a staged row: x rsqrt(sum x^2 + 1e-6) where `normalise`, times `scale`. Returns
// whether all of the row is finite.
SPECDEC_DEVICE bool finish_row(const Shared<float>& row, int DK, bool normalise, float scale,
                               Pack<float, 4> (&x)[kQuads]) {
  float square = 0.0f, zero = 0.0f;  // zero: NaN where an element is not finite
  SPECDEC_UNROLL
  for (int q = 0; q < kQuads; ++q) {
    const int c = 4 * lane() + 128 * q;
    x[q] = c < DK ? row.load_vec<4>(c) : Pack<float, 4>{};
    SPECDEC_UNROLL
    for (int e = 0; e < 4; ++e) {
      square = fma(x[q][e], x[q][e], square);
      zero = fma(x[q][e], 0.0f, zero);
    }
  }
  float factor = scale;
  if (normalise) factor *= 1.0f / sqrt(warp_sum(square) + 1e-6f);
  if (factor != 1.0f) {
    SPECDEC_UNROLL
    for (int q = 0; q < kQuads; ++q) {
      SPECDEC_UNROLL
      for (int e = 0; e < 4; ++e) x[q][e] *= factor;
    }
  }
  return !any(!(zero == 0.0f));
}

SPECDEC_DEVICE void store_row(const Shared<float>& row, int DK, const Pack<float, 4> (&x)[kQuads]) {
  SPECDEC_UNROLL
  for (int q = 0; q < kQuads; ++q) {
    const int c = 4 * lane() + 128 * q;
    if (c < DK) row.store_vec<4>(c, x[q]);
  }
}

}  // namespace specdec::cuda
