// What the CUDA benchmarks use of CUDA's runtime, on the host. With this directory first among the include
// directories they are compiled for the executor, whose session stands where a stream stands.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>

#include "session.h"

using cudaStream_t = specdec::simt::Session*;

enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };

namespace specdec::test {

// Every allocation there is, and its bytes.
inline std::map<void*, size_t>& device_memory() {
  static std::map<void*, size_t> memory;
  return memory;
}

}  // namespace specdec::test

inline cudaError_t cudaMalloc(void** data, size_t bytes) {
  constexpr size_t kAlign = 256;
  *data = std::aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign);
  if (*data == nullptr) return cudaErrorMemoryAllocation;
  specdec::test::device_memory()[*data] = bytes;
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* data) {
  specdec::test::device_memory().erase(data);
  std::free(data);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
inline cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "out of memory";
}
