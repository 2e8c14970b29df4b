// The CPU's verify_layer: bit for bit what its parts give one after the other. CTest runs this file once per
// instruction set (SPECDEC_CPU_ISA).
#include <gtest/gtest.h>

#include "layer_problem.h"
#include "ops.h"

namespace specdec::test {
namespace {

// rms_norm on the valid heads of `out`.
void norm_heads(const VerifyLayerParams& p) {
  const VerifyParams& v = p.verify;
  const int64_t size = v.dtype == DType::kFloat32 ? 4 : 2;
  for (int64_t b = 0; b < v.B; ++b) {
    const int64_t valid = v.slots[b] < 0 ? 0 : std::min<int64_t>(v.lengths[b], v.N);
    for (int64_t n = 0; n < valid; ++n) {
      char* const out = static_cast<char*>(v.out) + (b * v.N + n) * v.rec.HV * v.rec.DV * size;
      const LayerEpilogue& e = p.epilogue;
      const char* gate =
          static_cast<const char*>(e.gate) + (b * e.gate_stride.b + n * e.gate_stride.n) * size;
      RmsNormParams norm;
      norm.D = v.rec.DV;
      norm.x = {out, v.dtype, v.rec.HV, v.rec.HV, 0, v.rec.DV};
      norm.has_gate = e.gate != nullptr;
      norm.gate = {gate, v.dtype, v.rec.HV, v.rec.HV, 0, e.gate_stride.h};
      norm.weight = e.weight, norm.eps = e.eps;
      norm.y = out;
      ASSERT_EQ(cpu::rms_norm(norm), Status::kOk);
    }
  }
}

// conv_verify, gated_delta_gates, verify and rms_norm, on the pools and into the outputs of `p`.
void compose(const VerifyLayerParams& p) {
  const VerifyParams& v = p.verify;
  Buffer y(v.dtype, v.B * v.N * LayerChannels(v.rec, 0, 0).count);
  ASSERT_EQ(cpu::conv_verify(convolution_of(p, y.data())), Status::kOk);
  const int64_t rows = v.B * v.N;
  std::vector<float> g(rows * v.rec.HV), beta(g.size());
  const Strides& s = p.prologue.a_stride;
  GatesParams gates;
  gates.HV = v.rec.HV;
  gates.a = {p.prologue.a, v.dtype, rows, v.N, s.b, s.n};
  gates.b = {p.prologue.b, v.dtype, rows, v.N, s.b, s.n};
  gates.A_log = p.prologue.A_log, gates.dt_bias = p.prologue.dt_bias;
  gates.neg_eigval = p.prologue.neg_eigval;
  gates.g = g.data(), gates.beta = beta.data();
  ASSERT_EQ(cpu::gated_delta_gates(gates), Status::kOk);
  ASSERT_EQ(cpu::verify(verify_of(p, y, g.data(), beta.data())), Status::kOk);
  if (p.has_epilogue) norm_heads(p);
}

void expect_composition(const LayerCase& c, uint32_t seed) {
  const LayerProblem problem(c, seed);
  for (const Strategy strategy : {Strategy::kSerial, Strategy::kHybrid}) {
    Buffer states[2] = {problem.state, problem.state}, windows[2] = {problem.window, problem.window};
    LayerOutputs fused, parts;
    VerifyLayerParams p = problem.params(states[0], windows[0], fused);
    p.verify.strategy = strategy;
    ASSERT_EQ(cpu::verify_layer(p), Status::kOk);
    p = problem.params(states[1], windows[1], parts);
    p.verify.strategy = strategy;
    compose(p);
    expect_same(fused, parts);
    EXPECT_TRUE(same_bits(states[0], states[1])) << "state";
    EXPECT_TRUE(same_bits(windows[0], windows[1])) << "window";
  }
}

TEST(LayerTest, EqualsItsParts) {
  uint32_t seed = 0;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const Earlier earlier : {Earlier::kNothing, Earlier::kPending, Earlier::kPrefix}) {
      for (const bool tree : {false, true}) {
        LayerCase c;
        c.B = 5, c.HK = 2, c.HV = 6, c.DK = 48, c.DV = 67;  // rows that fill no block, grouped heads
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

TEST(LayerTest, AnyWindow) {
  for (const int64_t W : {1, 2, 3, 9, 16}) {
    for (const Earlier earlier : {Earlier::kPending, Earlier::kPrefix}) {
      LayerCase c;
      c.W = W, c.earlier = earlier, c.DV = 32;
      SCOPED_TRACE("W " + std::to_string(W));
      expect_composition(c, static_cast<uint32_t>(W));
    }
  }
}

TEST(LayerTest, NormAlone) {
  LayerCase c;
  c.B = 4;
  const LayerProblem problem(c, 3);
  Buffer state = problem.state, window = problem.window;
  LayerOutputs parts, alone;
  VerifyLayerParams p = problem.params(state, window, parts);
  compose(p);
  // The same tokens as given ones.
  Buffer y(c.dtype, c.B * c.N * problem.C);
  ASSERT_EQ(cpu::conv_verify(convolution_of(p, y.data())), Status::kOk);
  std::vector<float> beta(parts.g.f32.size());
  for (int64_t b = 0; b < c.B; ++b) {
    for (int64_t i = 0; i < problem.valid(b) * c.HV; ++i) {
      beta[b * c.N * c.HV + i] = static_cast<float>(i % 5) * 0.2f;
    }
  }
  VerifyLayerParams given = problem.params(state, window, alone);
  given.verify = verify_of(given, y, parts.g.f32.data(), beta.data());
  given.has_prologue = false;
  ASSERT_EQ(cpu::verify_layer(given), Status::kOk);
  VerifyLayerParams plain = problem.params(state, window, parts);
  plain.verify = verify_of(plain, y, alone.g.f32.data(), beta.data());
  plain.has_prologue = plain.has_epilogue = false;
  ASSERT_EQ(cpu::verify_layer(plain), Status::kOk);
  EXPECT_FALSE(same_bits(alone.out, parts.out));
  norm_heads(plain);
  expect_same(alone, parts);
  given.verify.g = nullptr;
  EXPECT_EQ(cpu::verify_layer(given), Status::kInvalidArgument);
}

TEST(LayerTest, Refusals) {
  const LayerProblem problem(LayerCase(), 5);
  Buffer state = problem.state, window = problem.window;
  LayerOutputs o;
  const auto refused = [&](Status status, auto&& change) {
    VerifyLayerParams p = problem.params(state, window, o);
    change(p);
    EXPECT_EQ(cpu::verify_layer(p), status);
  };
  refused(Status::kUnsupported, [](auto& p) { p.verify.strategy = Strategy::kSolve; });
  refused(Status::kUnsupported, [](auto& p) { p.verify.rec.gate = Gate::kChannel; });
  refused(Status::kUnsupported, [](auto& p) { p.prologue.W = 17; });
  refused(Status::kUnsupported, [](auto& p) { p.prologue.window.dtype = DType::kFloat16; });
  refused(Status::kInvalidArgument, [](auto& p) { p.prologue.mixed.dtype = DType::kFloat16; });
  refused(Status::kInvalidArgument, [](auto& p) {
    p.verify.has_pending = true;
    p.verify.pending.nodes = 3;
  });
  refused(Status::kInvalidArgument, [](auto& p) { p.verify.has_pending = p.verify.has_prefix = true; });
  EXPECT_TRUE(same_bits(state, problem.state));
  EXPECT_TRUE(same_bits(window, problem.window));
}

}  // namespace
}  // namespace specdec::test
