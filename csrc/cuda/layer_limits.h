// Which layers have a kernel.
#pragma once

#include <cstdint>

namespace specdec::cuda {

constexpr int kLayerTaps = 4;  // W of a fused convolution, at most
constexpr bool has_layer_keys(int64_t DK) { return DK == 64 || DK == 128 || DK == 256; }

}  // namespace specdec::cuda
