// Executes a kernel that is written with the primitives; included by csrc/cuda/launch.cuh only.
#pragma once

#include <string>

#include "kernel.h"
#include "primitives.cuh"
#include "session.h"

namespace specdec::simt {

// "VerifySerial<...>", from the compiler's name for this function.
template <typename Kernel>
const char* kernel_name() {
  static const std::string name = [](const std::string& function) {
    const size_t begin = function.find("Kernel = ") + 9;
    std::string result = function.substr(begin, function.rfind(']') - begin);
    for (const char* prefix : {"specdec::cuda::", "specdec::"}) {
      const std::string from = prefix;
      for (size_t at; (at = result.find(from)) != std::string::npos;) result.erase(at, from.size());
    }
    return result;
  }(__PRETTY_FUNCTION__);
  return name.c_str();
}

}  // namespace specdec::simt

namespace specdec::cuda {

template <typename Kernel>
Status launch(const typename Kernel::Params& params, Stream session) {
  using Params = typename Kernel::Params;
  if (session == nullptr) return Status::kInvalidArgument;
  const Launch shape = Kernel::shape(params);
  return session->run(
      simt::kernel_name<Kernel>(), shape.grid, Kernel::kThreads, shape.shared_bytes,
      [](const void* p) { Kernel::run(*static_cast<const Params*>(p), SharedArena()); }, &params);
}

}  // namespace specdec::cuda
