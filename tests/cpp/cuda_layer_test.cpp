// The CUDA backend's verify_layer through the executor, which must find nothing, or on a GPU: bit for bit its
// convolution and its verification one after the other; gates and norms against float64.
#include <gtest/gtest.h>

#include <string>

#include "../../csrc/cuda/ops.h"
#include "layer_problem.h"
#ifdef SPECDEC_SIMT
#include "session.h"
#else
#include "gpu/mirror.h"
#endif

namespace specdec::test {
namespace {

#ifndef SPECDEC_SIMT

constexpr bool kHostExp = false;  // exp of the host and of the kernels round alike

class CudaLayer {
 public:
  explicit CudaLayer(const LayerProblem& problem) : problem_(problem) {}

  Status fused(const VerifyLayerParams& p) { return gpu::call(p); }

  void composed(const VerifyLayerParams& p, const std::vector<float>& g, const std::vector<float>& beta) {
    Buffer y(p.verify.dtype, p.verify.B * p.verify.N * problem_.C);
    ASSERT_EQ(gpu::call(convolution_of(p, y.data())), Status::kOk);
    ASSERT_EQ(gpu::call(verify_of(p, y, g.data(), beta.data())), Status::kOk);
  }

 private:
  const LayerProblem& problem_;
};

#else

constexpr bool kHostExp = true;

class CudaLayer {
 public:
  explicit CudaLayer(const LayerProblem& problem) : problem_(problem) {}

  // The fused call on pools of the caller's.
  Status fused(const VerifyLayerParams& p) {
    simt::Session session = start(p, true);
    cuda::VerifyWorkspace workspace = cuda::verify_layer_workspace(p);
    std::vector<int32_t> counters(workspace.counters_count);
    workspace.counters = counters.data();
    if (!counters.empty()) {
      session.memory.add("counters", counters.data(), counters.size(), simt::Direction::kBoth);
    }
    const Status status = cuda::verify_layer(p, workspace, &session);
    for (const int32_t counter : counters) EXPECT_EQ(counter, 0) << "a counter was left behind";
    finish(session, status);
    return status;
  }

  // conv_verify and verify, with the gates that the fused call has written and the betas of its formula.
  void composed(const VerifyLayerParams& p, const std::vector<float>& g, const std::vector<float>& beta) {
    Buffer y(p.verify.dtype, p.verify.B * p.verify.N * problem_.C);
    {
      simt::Session session = start(p, false);
      session.memory.add("y", y.data(), y.bytes(), simt::Direction::kOutput);
      ASSERT_EQ(cuda::conv_verify(convolution_of(p, y.data()), &session), Status::kOk);
      finish(session, Status::kOk);
    }
    simt::Session session = start(p, true);
    session.memory.add("y", y.data(), y.bytes(), simt::Direction::kInput);
    session.memory.add("g", g.data(), g.size(), simt::Direction::kInput);
    session.memory.add("beta", beta.data(), beta.size(), simt::Direction::kInput);
    ASSERT_EQ(cuda::verify(verify_of(p, y, g.data(), beta.data()), {}, &session), Status::kOk);
    finish(session, Status::kOk);
  }

 private:
  // A session that knows the inputs, the pools and, where `outputs`, what a verification writes.
  simt::Session start(const VerifyLayerParams& p, bool outputs) {
    simt::Options options;
    options.seed = ++calls_;
    simt::Session session(options);
    problem_.visit_inputs([&](const char* name, const void* data, size_t bytes) {
      if (bytes > 0) session.memory.add(name, data, bytes, simt::Direction::kInput);
    });
    const VerifyParams& v = p.verify;
    const auto direction = v.has_pending ? simt::Direction::kBoth : simt::Direction::kInput;
    session.memory.add("state", v.state.data, problem_.state.bytes(), direction);
    session.memory.add("window", p.prologue.window.data, problem_.window.bytes(), direction);
    if (!outputs) return session;
    const int64_t rows = v.B * v.N, size = v.dtype == DType::kFloat32 ? 4 : 2;
    const auto output = [&](const char* name, const void* data, int64_t bytes) {
      session.memory.add(name, data, static_cast<size_t>(bytes), simt::Direction::kOutput);
    };
    const LayerCase& c = problem_.c;  // as the arrays are, whatever a test has made of the parameters
    output("out", v.out, rows * c.HV * c.DV * size);
    output("k_out", v.k_out, rows * c.HK * c.DK * 4);
    output("u_out", v.u_out, rows * c.HV * c.DV * 4);
    output("g_out", v.g_out, rows * c.HV * 4);
    return session;
  }

  static void finish(const simt::Session& session, Status status) {
    EXPECT_TRUE(session.report.clean()) << session.report.to_string();
    if (status != Status::kOk) return;
    for (const auto& buffer : session.memory.buffers()) {
      if (buffer.direction() != simt::Direction::kOutput) continue;
      EXPECT_EQ(buffer.bytes_with_values(), static_cast<int64_t>(buffer.end() - buffer.begin()))
          << buffer.name();
    }
  }

  const LayerProblem& problem_;
  uint64_t calls_ = 0;
};

#endif

// g is a product of three roundings at most, of exp and log1p that err by a few units in the last place, and
// of a sum whose rounding softplus passes on at a slope of at most 1.
void expect_gates(const LayerProblem& problem, const Buffer& g) {
  const LayerCase& c = problem.c;
  for (int64_t b = 0; b < c.B; ++b) {
    for (int64_t n = 0; n < problem.valid(b); ++n) {
      for (int64_t h = 0; h < c.HV; ++h) {
        const double x = problem.a(b, n, h) + problem.dt_bias(h), rate = std::exp(problem.A_log(h));
        const double want = -rate * (std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))));
        ASSERT_NEAR(g[(b * c.N + n) * c.HV + h], want, 0x1p-24 * (16 * std::abs(want) + rate * std::abs(x)));
      }
    }
  }
}

// The norm of `plain`'s heads in float64, rounded to the dtype; its sum of DV squares is off by at most DV /
// 32 + 5 roundings, the rest by a dozen, half of the sum's error after the root.
void expect_norm(const LayerProblem& problem, const Buffer& plain, const Buffer& normed) {
  const LayerCase& c = problem.c;
  const double rounding = c.dtype == DType::kFloat32 ? 0.0 : c.dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
  for (int64_t b = 0; b < c.B; ++b) {
    for (int64_t head = 0; head < problem.valid(b) * c.HV; ++head) {
      const int64_t at = (b * c.N * c.HV + head) * c.DV;
      double sum = 0.0;
      for (int64_t i = 0; i < c.DV; ++i) sum += plain[at + i] * plain[at + i];
      const double scale = 1.0 / std::sqrt(sum / static_cast<double>(c.DV) + 1e-5);
      for (int64_t i = 0; i < c.DV; ++i) {
        double want = plain[at + i] * scale * problem.norm_weight(i);
        if (c.gate) {
          const double z = problem.gate(b, head / c.HV, head % c.HV * c.DV + i);
          want *= z / (1.0 + std::exp(-z));
        }
        const double roundings = static_cast<double>(c.DV) / 32 + 17;
        ASSERT_NEAR(normed[at + i], want,
                    (0x1p-24 * roundings + rounding) * std::abs(want) + 0x1p-25);  // subnormal float16
      }
    }
  }
}

void expect_composition(LayerCase c, uint32_t seed) {
  c.plain_beta = !kHostExp;
  const LayerProblem problem(c, seed);
  CudaLayer cuda(problem);
  Buffer states[3] = {problem.state, problem.state, problem.state};
  Buffer windows[3] = {problem.window, problem.window, problem.window};
  LayerOutputs normed, plain, parts;
  ASSERT_EQ(cuda.fused(problem.params(states[0], windows[0], normed)), Status::kOk);
  VerifyLayerParams p = problem.params(states[1], windows[1], plain);
  p.has_epilogue = false;
  ASSERT_EQ(cuda.fused(p), Status::kOk);
  expect_same(normed, plain, !c.norm);
  expect_gates(problem, plain.g);
  if (c.norm) expect_norm(problem, plain.out, normed.out);

  std::vector<float> beta(plain.g.f32.size());
  for (int64_t b = 0; b < c.B; ++b) {
    for (int64_t i = 0; i < problem.valid(b) * c.HV; ++i) {
      const auto x = static_cast<float>(problem.b(b, i / c.HV, i % c.HV));
      beta[b * c.N * c.HV + i] = (c.neg_eigval ? 2.0f : 1.0f) / (1.0f + std::exp(-x));
    }
  }
  cuda.composed(problem.params(states[2], windows[2], parts), plain.g.f32, beta);
  expect_same(plain, parts);
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(same_bits(states[i], states[2])) << "state";
    EXPECT_TRUE(same_bits(windows[i], windows[2])) << "window";
  }
  for (int64_t b = 0; b < c.B; ++b) {  // padding is zero
    for (int64_t i = problem.valid(b) * c.HV * c.DV; i < c.N * c.HV * c.DV; ++i) {
      ASSERT_EQ(normed.out[b * c.N * c.HV * c.DV + i], 0.0);
    }
  }
}

TEST(CudaLayer, EqualsItsParts) {
  uint32_t seed = 0;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const Earlier earlier : {Earlier::kNothing, Earlier::kPending, Earlier::kPrefix}) {
      for (const bool tree : {false, true}) {
        LayerCase c;
        c.B = 5, c.HK = 2, c.HV = 4;  // grouped heads, two tiles a head
        c.dtype = dtype, c.earlier = earlier, c.tree = tree;
        c.window = ++seed % 2 == 0 ? dtype : DType::kFloat32;
        c.state = seed % 3 == 0 ? DType::kBFloat16 : DType::kFloat32;
        c.bias = seed % 4 != 0, c.neg_eigval = seed % 4 == 1, c.gate = seed % 5 != 0, c.norm = seed % 7 != 0;
        SCOPED_TRACE("seed " + std::to_string(seed));
        expect_composition(c, seed);
      }
    }
  }
}

TEST(CudaLayer, EveryWidth) {
  for (const int64_t DK : {128, 256}) {
    for (const DType state : {DType::kFloat32, DType::kBFloat16}) {
      LayerCase c;
      c.DK = DK, c.DV = DK == 128 ? 96 : 32, c.state = state, c.earlier = Earlier::kPending;
      c.dtype = c.window = DType::kBFloat16;
      SCOPED_TRACE("DK " + std::to_string(DK));
      expect_composition(c, static_cast<uint32_t>(DK));
    }
  }
}

TEST(CudaLayer, TallTiles) {
  LayerCase c;
  c.B = 32, c.N = 2, c.HK = 2, c.HV = 4, c.DV = 128, c.earlier = Earlier::kPending, c.tree = false;
  expect_composition(c, 3);
}

TEST(CudaLayer, FewTapsAndLongRows) {
  for (const int64_t W : {1, 2, 3}) {
    LayerCase c;
    c.W = W, c.N = 17, c.DV = 32, c.earlier = W == 3 ? Earlier::kPrefix : Earlier::kPending;
    SCOPED_TRACE("W " + std::to_string(W));
    expect_composition(c, static_cast<uint32_t>(W));
  }
}

#ifdef SPECDEC_SIMT

TEST(CudaLayer, Refusals) {
  const LayerProblem problem(LayerCase(), 5);
  Buffer state = problem.state, window = problem.window;
  LayerOutputs o;
  CudaLayer cuda(problem);
  const auto refused = [&](Status status, auto&& change) {
    VerifyLayerParams p = problem.params(state, window, o);
    change(p);
    EXPECT_EQ(cuda.fused(p), status);
  };
  refused(Status::kUnsupported, [](auto& p) { p.verify.rec.DK = 96; });
  refused(Status::kUnsupported, [](auto& p) { p.verify.rec.gate = Gate::kChannel; });
  refused(Status::kUnsupported, [](auto& p) { p.verify.strategy = Strategy::kSolve; });
  refused(Status::kUnsupported, [](auto& p) { p.prologue.W = 5; });
  refused(Status::kInvalidArgument, [](auto& p) { p.prologue.mixed.dtype = DType::kFloat16; });
  VerifyLayerParams p = problem.params(state, window, o);
  simt::Session session{simt::Options()};
  EXPECT_EQ(cuda::verify_layer(p, {}, &session), Status::kInvalidArgument) << "no counters for the norm";
}

#endif

}  // namespace
}  // namespace specdec::test
