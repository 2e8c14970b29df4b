// What a kernel and its caller agree on: the grid, the stream, and the name of the function that launches.
// The launch itself is defined in launch.cuh, which only the files with instances include, so that a kernel
// is compiled where it is instantiated and nowhere else.
#pragma once

#include <cstdint>

#include "specdec/types.h"

#ifdef SPECDEC_SIMT
namespace specdec::simt {
class Session;
}
#else
struct CUstream_st;
#endif

namespace specdec::cuda {

#ifdef SPECDEC_SIMT
using Stream = simt::Session*;
#else
using Stream = CUstream_st*;  // cudaStream_t, without CUDA's headers
#endif

struct Index3 {
  int32_t x = 1, y = 1, z = 1;
};

struct Launch {
  Index3 grid;               // blocks; y and z at most 65535
  int64_t shared_bytes = 0;  // dynamic shared memory of a block
};

// Starts Kernel::run on the grid that Kernel::shape(params) asks for. An empty grid is kOk and starts
// nothing.
template <typename Kernel>
Status launch(const typename Kernel::Params& params, Stream stream);

}  // namespace specdec::cuda
