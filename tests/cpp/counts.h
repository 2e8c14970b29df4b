// What the executor counted for one buffer.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "report.h"

namespace specdec::test {

// Fails the test where the kernel's launches knew no buffer of that name.
inline simt::BufferCounts buffer(const simt::KernelCounts& counts, const std::string& name) {
  for (const simt::BufferCounts& candidate : counts.buffers) {
    if (candidate.name == name) return candidate;
  }
  ADD_FAILURE() << counts.kernel << " has no buffer " << name;
  return {};
}

}  // namespace specdec::test
