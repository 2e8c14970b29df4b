// Benchmarks of the CUDA backend; docs/gpu.md explains the columns.
//   specdec_bench_cuda --benchmark_filter=verify --benchmark_format=json
// Exit status 1 where an answer was wrong. Without a GPU: a line, and exit status 0, or 1 with --require-gpu.
#include <benchmark/benchmark.h>

#include "measure.h"

int main(int argc, char** argv) {
  int status = 0;
  if (specdec::gpu::without_gpu(&argc, argv, "measured", &status)) return status;
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  cudaDeviceProp device;
  specdec::gpu::check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
  benchmark::AddCustomContext("gpu", device.name);
  benchmark::AddCustomContext("l2_bytes", std::to_string(device.l2CacheSize));
  benchmark::AddCustomContext("copy_GB/s", std::to_string(specdec::bench::copy_rate()));
  specdec::bench::add_verify();
  specdec::bench::add_commit();
  specdec::bench::add_convolution();
  specdec::bench::add_layer();
  specdec::bench::add_prefill();
  specdec::bench::add_acceptance();
  benchmark::RunSpecifiedBenchmarks();
  return specdec::bench::failed() ? 1 : 0;
}
