#include "measure.h"

#include <benchmark/benchmark.h>

#include <algorithm>
#include <random>

namespace specdec::bench {
namespace {

using gpu::check;

struct Events {
  cudaEvent_t begin, end;
  Events() {
    check(cudaEventCreate(&begin), "cudaEventCreate");
    check(cudaEventCreate(&end), "cudaEventCreate");
  }
  ~Events() {
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
  }
  double us() const {
    check(cudaEventSynchronize(end), "a replay");
    float ms = 0.0f;
    check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    return 1e3 * ms;
  }
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

bool any_failed = false;

}  // namespace

cudaStream_t stream() {
  static const cudaStream_t s = [] {
    cudaStream_t made;
    check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreate");
    return made;
  }();
  return s;
}

int64_t rotation(double bytes) {
  int device = 0, l2 = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device), "cudaDeviceGetAttribute");
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  const int64_t fits = static_cast<int64_t>(0.5 * static_cast<double>(free) / bytes);
  const int64_t wanted = 2 + static_cast<int64_t>(3.0 * l2 / bytes);
  return std::min({fits, wanted, int64_t{512}});
}

Time replay(const Call& call, int64_t sets, int replays) {
  // Outside of a capture first: it loads the kernels and shows a refused shape.
  const Status status = call(0, stream());
  if (status != Status::kOk) return {-1.0, "status " + std::to_string(static_cast<int>(status))};
  check(cudaStreamSynchronize(stream()), "the first call");
  check(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  bool started = true;
  for (int64_t set = 0; set < sets; ++set) started &= call(set, stream()) == Status::kOk;
  cudaGraph_t graph = nullptr;
  if (cudaStreamEndCapture(stream(), &graph) != cudaSuccess || !started) {
    (void)cudaGetLastError();
    return {-1.0, "the calls could not be captured in a graph"};
  }
  cudaGraphExec_t executable = nullptr;
  check(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  for (int i = 0; i < 3; ++i) check(cudaGraphLaunch(executable, stream()), "cudaGraphLaunch");
  const Events events;
  std::vector<double> times;
  for (int i = 0; i < replays; ++i) {
    check(cudaEventRecord(events.begin, stream()), "cudaEventRecord");
    check(cudaGraphLaunch(executable, stream()), "cudaGraphLaunch");
    check(cudaEventRecord(events.end, stream()), "cudaEventRecord");
    times.push_back(events.us() / static_cast<double>(sets));
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  return {median(times), ""};
}

double copy_rate() {
  static const double rate = [] {
    constexpr size_t kBytes = size_t{512} << 20;
    const gpu::DeviceMemory from(kBytes), to(kBytes);
    check(cudaMemset(from.data(), 0x3c, kBytes), "cudaMemset");  // no zeros, which may be cheaper to move
    const Time time = replay(
        [&](int64_t, cudaStream_t s) {
          return cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, s) == cudaSuccess
                     ? Status::kOk
                     : Status::kLaunchFailed;
        },
        1);
    return 2.0 * kBytes / time.us / 1e3;
  }();
  return rate;
}

void fill(gpu::DeviceMemory& memory, DType dtype, double scale, double shift, unsigned seed) {
  const size_t size = dtype == DType::kFloat32 ? 4 : 2, block = std::min(memory.bytes(), size_t{1} << 18);
  if (block == 0) return;
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform(-1.0, 1.0);
  std::vector<char> host(block);
  for (size_t at = 0; at + size <= block; at += size) {
    const float x = static_cast<float>(scale * uniform(random) + shift);
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    if (size == 2) bits >>= 16;  // bfloat16, truncated
    std::memcpy(&host[at], &bits, size);
  }
  char* data = static_cast<char*>(memory.data());
  check(cudaMemcpy(data, host.data(), block, cudaMemcpyHostToDevice), "cudaMemcpy");
  for (size_t done = block; done < memory.bytes(); done *= 2) {
    check(cudaMemcpy(data + done, data, std::min(done, memory.bytes() - done), cudaMemcpyDeviceToDevice),
          "cudaMemcpy");
  }
}

bool failed() { return any_failed; }

void add(const std::string& name, std::function<Result()> body) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [body](benchmark::State& state) {
                                 for (auto _ : state) {
                                   const Result result = body();
                                   if (const Time& failure = result.failure(); failure.us < 0.0) {
                                     any_failed |= failure.error != kTooSmall;
                                     const char* what = &failure == &result.steps ? "single steps: " : "";
                                     state.SkipWithError((what + failure.error).c_str());
                                     return;
                                   }
                                   state.SetIterationTime(result.time.us * 1e-6);
                                   const double rate = result.bytes / result.time.us / 1e3;
                                   state.counters["us"] = result.time.us;
                                   state.counters["GB/s"] = rate;
                                   state.counters["of_copy"] = rate / copy_rate();
                                   if (result.steps.us > 0.0)
                                     state.counters["of_steps"] = result.steps.us / result.time.us;
                                 }
                               })
      ->UseManualTime()
      ->Iterations(1)  // which is 25 replays of a graph; the time is their median
      ->Unit(benchmark::kMicrosecond);
}

}  // namespace specdec::bench
