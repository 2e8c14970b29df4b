// Defines launch<Kernel>. Included by the files that instantiate kernels.
#pragma once

#include "kernel.h"
#include "primitives.cuh"

#ifdef SPECDEC_SIMT
#include "../simt/launch.h"
#else

#include <cuda_runtime.h>

#include <type_traits>

namespace specdec::cuda {

namespace detail {

// Blocks that shall fit on a multiprocessor, which bounds the registers: Kernel::kMinBlocks, 1 where it has
// none.
template <typename Kernel, typename = void>
struct MinBlocks : std::integral_constant<int, 1> {};
template <typename Kernel>
struct MinBlocks<Kernel, std::void_t<decltype(Kernel::kMinBlocks)>>
    : std::integral_constant<int, Kernel::kMinBlocks> {};

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, MinBlocks<Kernel>::value)
    run(const __grid_constant__ typename Kernel::Params params) {
  extern __shared__ uint4 shared[];  // aligned to 16 bytes
  Kernel::run(params, SharedArena(reinterpret_cast<char*>(shared)));
}

}  // namespace detail

template <typename Kernel>
Status launch(const typename Kernel::Params& params, Stream stream) {
  const Launch shape = Kernel::shape(params);
  const Index3 grid = shape.grid;
  if (grid.x < 0 || grid.y < 0 || grid.z < 0) return Status::kInvalidArgument;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return Status::kOk;
  if (grid.y > 65535 || grid.z > 65535) return Status::kUnsupported;
  constexpr int64_t kSharedBytesUnasked = 48 << 10;
  if (shape.shared_bytes > kSharedBytesUnasked) {
    const cudaError_t error =
        cudaFuncSetAttribute(detail::run<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shape.shared_bytes));
    if (error != cudaSuccess) {
      (void)cudaGetLastError();  // it must not be taken for the next launch's
      return error == cudaErrorInvalidValue ? Status::kUnsupported : Status::kLaunchFailed;
    }
  }
  detail::run<Kernel>
      <<<dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z)),
         Kernel::kThreads, static_cast<size_t>(shape.shared_bytes), stream>>>(params);
  return cudaGetLastError() == cudaSuccess ? Status::kOk : Status::kLaunchFailed;
}

}  // namespace specdec::cuda

#endif

// One instance of a kernel: SPECDEC_INSTANCE(VerifySolve, SolveTraits<...>), inside namespace specdec::cuda.
#define SPECDEC_INSTANCE(Kernel, ...) \
  template ::specdec::Status launch<Kernel<__VA_ARGS__>>(const Kernel<__VA_ARGS__>::Params&, Stream);
