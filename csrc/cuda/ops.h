// The CUDA backend's entry points. Each checks what its kernels may assume, chooses the instance and starts
// it on the stream: no allocation, no wait, so that calls can be captured in a CUDA graph.
#pragma once

#include <cstdint>

#include "kernel.h"
#include "specdec/acceptance_params.h"
#include "specdec/params.h"

namespace specdec::cuda {

// Memory of the device for one call at a time. `data` is aligned to 16 bytes and zero when it is used first;
// every call leaves the part that it needs zero for the next.
struct Workspace {
  void* data = nullptr;
  int64_t bytes = 0;
};

// Bytes of workspace that `verify` wants for the call; no pointer is read.
int64_t verify_workspace_bytes(const VerifyParams& p);

// kUnsupported: a shape, type, stride or strategy that no kernel has, or too small a workspace.
Status verify(const VerifyParams& p, Workspace workspace, Stream stream);

Status commit(const CommitParams& p, Stream stream);

Status conv_verify(const ConvVerifyParams& p, Stream stream);
Status conv_commit(const ConvCommitParams& p, Stream stream);

// The workspaces of acceptance need no zeros.
int64_t accept_greedy_workspace_bytes(const AcceptGreedyParams& p);
Status accept_greedy(const AcceptGreedyParams& p, Workspace workspace, Stream stream);
int64_t accept_sampled_workspace_bytes(const AcceptSampledParams& p);
Status accept_sampled(const AcceptSampledParams& p, Workspace workspace, Stream stream);

}  // namespace specdec::cuda
