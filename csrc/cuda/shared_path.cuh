// An accepted path, fetched once by a block.
#pragma once

#include "device_values.cuh"
#include "specdec/params.h"

namespace specdec::cuda {

class SharedPath {
 public:
  SPECDEC_HOST_DEVICE static int64_t shared_bytes(const PathView& path) {
    return path.path != nullptr ? (path.max_length * 4 + 15) / 16 * 16 : 0;
  }

  SharedPath() = default;
  SPECDEC_DEVICE SharedPath(const PathView& path, SharedArena& shared) : given_(path.path != nullptr) {
    if (given_) nodes_ = shared.take<int32_t>(path.max_length);
  }

  // Into `count` nodes. By the whole block, with a barrier.
  SPECDEC_DEVICE void load(const PathView& path, int64_t b, int length, int64_t count, int threads) {
    if (!given_) return;
    const Global<const int32_t> nodes(path.path);
    for (int i = thread(); i < length; i += threads) {
      nodes_.store(i, path_node(nodes.load(b * path.max_length + i), count));
    }
    barrier();
  }

  SPECDEC_DEVICE int node(int i) const { return given_ ? nodes_.load(i) : i; }

 private:
  bool given_ = false;
  Shared<int32_t> nodes_;
};

}  // namespace specdec::cuda
