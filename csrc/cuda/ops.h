// The CUDA backend's entry points. Each checks what its kernels may assume, chooses the instance and starts it
// on the stream: no allocation, no wait, so that calls can be captured in a CUDA graph.
#pragma once

#include <cstdint>

#include "kernel.h"
#include "specdec/params.h"

namespace specdec::cuda {

Status conv_verify(const ConvVerifyParams& p, Stream stream);
Status conv_commit(const ConvCommitParams& p, Stream stream);

}  // namespace specdec::cuda
