// The products of the tensor cores, through CuTe's MMA atoms. Apart from the other primitives, for CuTe's
// headers take longer to compile than a small kernel. The executor's are in csrc/simt/primitives.h.
#pragma once

#include "primitives.cuh"

#ifndef SPECDEC_SIMT

#include <cute/arch/mma_sm80.hpp>

namespace specdec::cuda {

SPECDEC_DEVICE void mma_tf32(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
  cute::SM80_16x8x8_F32TF32TF32F32_TN::fma(
      d[0], d[1], d[2], d[3], __float_as_uint(a[0]), __float_as_uint(a[1]), __float_as_uint(a[2]),
      __float_as_uint(a[3]), __float_as_uint(b[0]), __float_as_uint(b[1]), d[0], d[1], d[2], d[3]);
}
SPECDEC_DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b[0], b[1], d[0],
                                            d[1], d[2], d[3]);
}

}  // namespace specdec::cuda

#endif
