// layer/fused, layer/parts: the short convolution, the gates and a verification of 8 tokens, 8 pending, of a
// layer in one launch, or conv_verify and verify, whose gates are given: on a GPU torch makes them in
// between.
#include <cmath>

#include "../../../tests/cpp/buffer.h"
#include "layers.h"

namespace specdec::bench {
namespace {

using gpu::check;
using gpu::DeviceMemory;

constexpr int64_t kTokens = 8, kWidth = 4;

std::vector<char> download(const void* data, int64_t bytes) {
  std::vector<char> host(static_cast<size_t>(bytes));
  check(cudaMemcpy(host.data(), data, host.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return host;
}

void upload(void* data, const void* host, size_t bytes) {
  check(cudaMemcpy(data, host, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
}

struct RawLayers {
  explicit RawLayers(int64_t B_) : B(B_), layers(kQwen, B_, kTokens, kTokens) {
    if (layers.sets() <= 0) return;
    const auto make = [](int64_t bytes, DType dtype, double scale, double shift, unsigned seed) {
      DeviceMemory memory(static_cast<size_t>(bytes));
      fill(memory, dtype, scale, shift, seed);
      return memory;
    };
    const int64_t sets = layers.sets();
    mixed = make(sets * rows(kTokens), DType::kBFloat16, 1.0, 0.0, 1);
    pending = make(sets * rows(kTokens), DType::kBFloat16, 1.0, 0.0, 2);
    window = make(sets * rows(kWidth - 1), DType::kBFloat16, 1.0, 0.0, 3);
    weight = make(4 * C * kWidth, DType::kFloat32, 1.0, 0.0, 4);
    // Of all sets, as they are small. Decays near those of the other benchmarks.
    a = make(2 * gates(), DType::kBFloat16, 1.0, 0.0, 5),
    b = make(2 * gates(), DType::kBFloat16, 1.0, 0.0, 6);
    A_log = make(4 * kQwen.HV, DType::kFloat32, 0.0, -2.6, 7);
    dt_bias = make(4 * kQwen.HV, DType::kFloat32, 0.1, 0.0, 8);
    y = DeviceMemory(static_cast<size_t>(sets * rows(kTokens)));
    counters = DeviceMemory(static_cast<size_t>(4 * cuda::verify_layer_workspace(fused(0)).counters_count));
    check(cudaMemset(counters.data(), 0, counters.bytes()), "cudaMemset");
    make_gates();
  }

  int64_t rows(int64_t n) const { return 2 * B * n * C; }  // bytes
  int64_t gates() const { return B * kTokens * kQwen.HV; }
  static void* at(const DeviceMemory& memory, int64_t offset) {
    return static_cast<char*>(memory.data()) + offset;
  }

  // What the fused launch makes of a and b, for the parts.
  void make_gates() {
    const std::vector<char> from_a = download(a.data(), 2 * gates()),
                            from_b = download(b.data(), 2 * gates()),
                            from_A = download(A_log.data(), 4 * kQwen.HV),
                            from_dt = download(dt_bias.data(), 4 * kQwen.HV);
    std::vector<float> made_g, made_beta;
    for (int64_t i = 0; i < gates(); ++i) {
      const double x = test::widen(from_a.data(), DType::kBFloat16, i) +
                       test::widen(from_dt.data(), DType::kFloat32, i % kQwen.HV);
      const double A = std::exp(test::widen(from_A.data(), DType::kFloat32, i % kQwen.HV));
      made_g.push_back(static_cast<float>(-A * std::log1p(std::exp(x))));
      made_beta.push_back(
          static_cast<float>(1.0 / (1.0 + std::exp(-test::widen(from_b.data(), DType::kBFloat16, i)))));
    }
    g = DeviceMemory(made_g.size() * 4), beta = DeviceMemory(made_beta.size() * 4);
    upload(g.data(), made_g.data(), g.bytes()), upload(beta.data(), made_beta.data(), beta.bytes());
  }

  VerifyLayerParams fused(int64_t set) const {
    VerifyLayerParams p;
    p.verify = layers.verify(set, Strategy::kSerial, false, kTokens);
    p.verify.q = p.verify.k = p.verify.v = nullptr;
    p.verify.g = p.verify.beta = nullptr;
    p.has_prologue = true;
    LayerPrologue& from = p.prologue;
    const DType dtype = DType::kBFloat16;
    from.mixed = {at(mixed, set * rows(kTokens)), dtype, kTokens, kTokens * C, C};
    from.pending = {at(pending, set * rows(kTokens)), dtype, kTokens, kTokens * C, C};
    from.W = kWidth;
    from.weight = static_cast<const float*>(weight.data());
    from.window = {at(window, set * rows(kWidth - 1)), dtype, B, (kWidth - 1) * C};
    from.a = a.data(), from.b = b.data();
    from.a_stride = from.b_stride = {kTokens * kQwen.HV, kQwen.HV, 1};
    from.A_log = static_cast<const float*>(A_log.data());
    from.dt_bias = static_cast<const float*>(dt_bias.data());
    return p;
  }

  Status run_fused(int64_t set, cudaStream_t s) const {
    const VerifyLayerParams p = fused(set);
    cuda::VerifyWorkspace space = cuda::verify_layer_workspace(p);
    space.counters = static_cast<int32_t*>(counters.data());
    return cuda::verify_layer(p, space, s);
  }

  Status run_convolution(int64_t set, cudaStream_t s) const {
    return cuda::conv_verify(convolution_of(fused(set), at(y, set * rows(kTokens))), s);
  }
  Status run_verify(int64_t set, cudaStream_t s) const {
    VerifyParams p = layers.verify(set, Strategy::kSerial, false, kTokens);
    const auto channel = [&](int64_t first) { return at(y, set * rows(kTokens) + 2 * first); };
    const LayerChannels first(p.rec, 0, 0);
    p.q = channel(first.q), p.k = channel(first.k), p.v = channel(first.v);
    p.q_stride = p.k_stride = p.v_stride = {kTokens * C, C, kQwen.D};
    p.g = static_cast<const float*>(g.data()), p.beta = static_cast<const float*>(beta.data());
    return layers.run(p, s);
  }

  // The answers of set 0, poisoned before: `out` of all sequences, the state and the window. Both are then as
  // they were.
  template <typename Run>
  std::vector<std::vector<char>> answers(const Run& call) const {
    const VerifyLayerParams p = fused(0);
    const int64_t out_bytes = 2 * B * kTokens * kQwen.HV * kQwen.D;
    void* pools[] = {layers.state(0), at(window, 0)};
    const int64_t bytes[] = {layers.state_bytes(), rows(kWidth - 1)};
    const std::vector<char> before[] = {download(pools[0], bytes[0]), download(pools[1], bytes[1])};
    check(cudaMemset(p.verify.out, 0xff, static_cast<size_t>(out_bytes)), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaMemset");
    if (!call()) return {};
    std::vector<std::vector<char>> all = {download(p.verify.out, out_bytes)};
    for (int i = 0; i < 2; ++i) {
      all.push_back(download(pools[i], bytes[i]));
      upload(pools[i], before[i].data(), before[i].size());
    }
    return all;
  }

  // Empty, or in what the launch differs from its parts, each of which has benchmarks that are compared with
  // the CPU backend.
  std::string wrong() const {
    const auto done = [](Status status, const char* what) {
      if (status == Status::kOk) check(cudaDeviceSynchronize(), what);
      return status == Status::kOk;
    };
    const auto one = answers([&] { return done(run_fused(0, stream()), "verify_layer"); });
    const auto two = answers([&] {
      return done(run_convolution(0, stream()), "conv_verify") && done(run_verify(0, stream()), "verify");
    });
    if (one.empty() || two.empty()) return "the CUDA backend refuses the shape";
    if (one[1] != two[1] || one[2] != two[2]) return "the state or the window differs from that of the parts";
    double off = 0.0, size = 0.0;
    for (int64_t i = 0; i < static_cast<int64_t>(one[0].size()) / 2; ++i) {
      const double x = test::widen(one[0].data(), DType::kBFloat16, i),
                   want = test::widen(two[0].data(), DType::kBFloat16, i);
      off += (x - want) * (x - want), size += want * want;
    }
    // Gates that were rounded another way move a bfloat16 by half a unit at most, and few of them.
    return std::sqrt(off / size) <= 0x1p-9 ? "" : "out differs from that of the parts";
  }

  int64_t B;
  static constexpr int64_t C = (2 * kQwen.HK + kQwen.HV) * kQwen.D;
  Layers layers;
  DeviceMemory mixed, pending, window, weight, a, b, A_log, dt_bias, y, counters, g, beta;
};

}  // namespace

void add_layer() {
  for (const int64_t B : {1, 8, 32}) {
    for (const bool fused : {true, false}) {
      add(std::string("layer/") + (fused ? "fused" : "parts") + "/" + kQwen.name + "/B:" + std::to_string(B),
          [=]() -> Result {
            const RawLayers raw(B);
            if (raw.layers.sets() <= 0) return {{-1.0, kTooSmall}};
            const std::string fault = raw.wrong();
            if (!fault.empty()) return {{-1.0, fault}};
            const Call call = [&](int64_t set, cudaStream_t s) {
              if (fused) return raw.run_fused(set, s);
              const Status status = raw.run_convolution(set, s);
              return status == Status::kOk ? raw.run_verify(set, s) : status;
            };
            // Tokens come raw, as wide; a and b are half as wide as g and beta. Of the pending inputs those
            // are read that become the window, which is written.
            const double bytes = raw.layers.verify_bytes(kTokens) - static_cast<double>(4 * raw.gates()) +
                                 static_cast<double>(2 * raw.rows(kWidth - 1) + 4 * RawLayers::C * kWidth);
            return {replay(call, raw.layers.sets()), bytes};
          });
    }
  }
}

}  // namespace specdec::bench
