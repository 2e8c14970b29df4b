// rotate_heads: rotary position embedding. Two products and a sum, each rounded by itself: what plain code in
// float32 gives, element by element.
#include "ops.h"
#include "parallel.h"
#include "rows.h"

namespace specdec::cpu::SPECDEC_ISA {

namespace {

// `half`: D / 2.
template <typename T>
inline void rotate_row(const T* x, const float* cos, const float* sin, int64_t half, T* y) {
  for_vectors(half, [&](int64_t i, int64_t n) {
    const Vec low = load_some(x + i, n), high = load_some(x + half + i, n);
    store_some(y + i, low * load_some(cos + i, n) + high * load_some(sin + i, n), n);
    store_some(y + half + i, high * load_some(cos + half + i, n) + low * load_some(sin + half + i, n), n);
  });
}

}  // namespace

Status rotate_heads(const RotateHeadsParams& p) {
  if (p.D % 2 != 0) return Status::kUnsupported;
  visit_dtype(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(p.B * p.N, p.B * p.N * p.H * p.D * 2, [&](int64_t row) {
      const int64_t b = row / p.N, n = row % p.N;
      const float* rotation = p.rotation + b * p.rotation_stride_b + n * p.rotation_stride_n;
      const T* x = static_cast<const T*>(p.x) + b * p.x_stride.b + n * p.x_stride.n;
      T* y = static_cast<T*>(p.y) + row * p.H * p.D;
      for (int64_t h = 0; h < p.H; ++h) {
        rotate_row(x + h * p.x_stride.h, rotation, rotation + p.D, p.D / 2, y + h * p.D);
      }
    });
  });
  return Status::kOk;
}

}  // namespace specdec::cpu::SPECDEC_ISA
