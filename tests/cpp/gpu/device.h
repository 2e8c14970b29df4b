// A GPU's memory for tests and benchmarks, and what they say where there is no GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace specdec::gpu {

// Ends the program on an error of the runtime: whatever it measured or tested next would mean nothing.
inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// One allocation; freed with it.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(size_t bytes) : bytes_(bytes) {
    if (bytes > 0) check(cudaMalloc(&data_, bytes), "cudaMalloc");
  }
  DeviceMemory(DeviceMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~DeviceMemory() { cudaFree(data_); }

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Without a GPU: prints one line and returns true, with the program's exit status: 0, or 1 where the argument
// --require-gpu was given. The argument is taken out of argv.
inline bool without_gpu(int* argc, char** argv, const char* what, int* status) {
  bool required = false;
  int kept = 0;
  for (int i = 0; i < *argc; ++i) {
    if (std::strcmp(argv[i], "--require-gpu") == 0) {
      required = true;
    } else {
      argv[kept++] = argv[i];
    }
  }
  *argc = kept;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0) return false;
  (void)cudaGetLastError();
  std::printf("no CUDA device: nothing %s\n", what);
  *status = required ? 1 : 0;
  return true;
}

}  // namespace specdec::gpu
