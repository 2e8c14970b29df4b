// The ops of the CUDA backend. Each launches on `stream` and returns: no synchronisation, no allocation. Pointers are
// the device's; lengths, slots and paths are read there.
#pragma once

#include "kernel.h"
#include "specdec/params.h"

namespace specdec::cuda {

Status conv_verify(const ConvVerifyParams& p, Stream stream);
Status conv_commit(const ConvCommitParams& p, Stream stream);

}  // namespace specdec::cuda
