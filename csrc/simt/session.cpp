#include "session.h"

#include <algorithm>
#include <mutex>

#include "executor.h"

namespace specdec::simt {

Status Session::run(const char* kernel, cuda::Index3 grid, int threads, int64_t shared_bytes,
                    void (*body)(const void*), const void* params) {
  static std::mutex one_launch;
  const std::lock_guard<std::mutex> lock(one_launch);
  if (grid.x < 0 || grid.y < 0 || grid.z < 0) return Status::kInvalidArgument;
  if (grid.y > 65535 || grid.z > 65535 || threads > 1024 || threads % kWarpSize != 0 ||
      shared_bytes > options.shared_limit) {
    return Status::kUnsupported;
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return Status::kOk;
  auto counts = std::find_if(report.kernels.begin(), report.kernels.end(),
                             [&](const KernelCounts& k) { return k.kernel == kernel; });
  if (counts == report.kernels.end()) {
    counts = report.kernels.insert(counts, KernelCounts{});
    counts->kernel = kernel;
  }
  ++counts->launches;
  counts->shared_bytes = std::max(counts->shared_bytes, shared_bytes);
  Executor(*this, *counts, grid, threads, shared_bytes, ++launches_, body, params).run();
  return Status::kOk;
}

}  // namespace specdec::simt
