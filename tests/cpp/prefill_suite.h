// prefill against the sequential recurrence in float64. Included by the tests of a backend, which define
// before
//   TestProblem         a Problem that calls it
//   kPrecision          what it is called with
//   kErrors             how far it may be off, over what float32 may
//   kValueRows          value rows that it takes
//   prefill_shapes()    what it is to follow, one sequence each
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>

#include "recurrence_problem.h"

namespace specdec::test {
namespace {

class Prefill : public TestProblem {
 public:
  using TestProblem::TestProblem;

  PrefillParams params() {
    PrefillParams p;
    fill_common(p, state, 0);
    p.T = shape.N;
    p.precision = kPrecision;
    return p;
  }

  // Runs p on `state`; `out` is written anew.
  void prefill(PrefillParams p, Status expected = Status::kOk) {
    const int64_t rows = p.cu_seqlens != nullptr ? 1 : p.B;
    out = Buffer(shape.dtype, rows * p.T * shape.HV * shape.DV);
    p.out = out.data();
    ASSERT_EQ(this->call(p), expected);
  }

  // Tokens [first, first + n) of row `row`; `before` is the state before the call.
  void expect_sequence(int64_t b, int64_t row, int64_t first, int64_t n, const Buffer& before) {
    const Shape& s = shape;
    // Numbers of a 16-bit type are rounded once, bfloat16 the coarsest.
    const auto rounding = [](DType dtype, double x) {
      return dtype == DType::kFloat32 ? 0.0 : dtype == DType::kBFloat16 ? 0x1p-8 * x : 0x1p-11 * x + 0x1p-25;
    };
    for (int64_t hv = 0; hv < s.HV; ++hv) {
      SCOPED_TRACE(testing::Message() << "sequence " << b << " head " << hv);
      const Truth t(Reference(*this, before, state_at(b, hv), row, hv), first, n, nullptr);
      const double out_tolerance = kErrors * t.tolerance(s.DK, n, t.row_norm * t.q_norm);
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t r = 0; r < s.DV; ++r) {
          const double got = out[((row * s.N + first + i) * s.HV + hv) * s.DV + r], want = t.steps[i].out[r];
          ASSERT_NEAR(got, want, out_tolerance + rounding(s.dtype, std::abs(want) + out_tolerance))
              << "token " << i << " row " << r;
        }
      }
      const double state_tolerance = kErrors * t.tolerance(s.DK, n, t.row_norm);
      for (int64_t i = 0; i < s.DV * s.DK; ++i) {
        ASSERT_NEAR(state[state_at(b, hv) + i], t.state[i],
                    state_tolerance + rounding(s.state, std::abs(t.state[i]) + state_tolerance))
            << "state " << i;
      }
    }
  }

  void expect_zero(int64_t row, int64_t first, int64_t end) {
    const int64_t width = shape.HV * shape.DV;
    for (int64_t i = (row * shape.N + first) * width; i < (row * shape.N + end) * width; ++i) {
      ASSERT_EQ(out[i], 0.0) << i;
    }
  }

  Buffer out;
};

TEST(Prefill, FollowsReference) {
  unsigned seed = 0;
  for (const Shape& s : prefill_shapes()) {
    SCOPED_TRACE(testing::Message() << "gate " << static_cast<int>(s.gate) << " update "
                                    << static_cast<int>(s.update) << " T " << s.N << " DK " << s.DK << " DV "
                                    << s.DV);
    Prefill problem(s, seed++);
    const Buffer before = problem.state;
    problem.prefill(problem.params());
    for (int64_t b = 0; b < s.B; ++b) problem.expect_sequence(b, b, 0, s.N, before);
    if (HasFatalFailure()) return;
  }
}

TEST(Prefill, PaddedRowsAreZeroAndUnread) {
  Shape s;
  s.B = 4, s.N = 70, s.HK = 2, s.DV = kValueRows;
  Prefill problem(s, 8);
  problem.slots[1] = -1;
  const std::vector<int32_t> lengths = {65, 70, 0, 99};
  for (const auto& [b, from] : {std::pair<int64_t, int64_t>{0, 65}, {1, 0}, {2, 0}}) {
    for (Tensor* x : {&problem.q, &problem.k, &problem.v, &problem.g, &problem.beta}) {
      std::fill(&x->buffer.f32[x->at(b, from, 0)], &x->buffer.f32[x->at(b, s.N, 0)], kNaN);
    }
  }
  const Buffer before = problem.state;
  PrefillParams p = problem.params();
  p.lengths = lengths.data();
  problem.prefill(p);
  problem.expect_sequence(0, 0, 0, 65, before);
  problem.expect_sequence(3, 3, 0, 70, before);
  problem.expect_zero(0, 65, 70);
  problem.expect_zero(1, 0, 70);
  problem.expect_zero(2, 0, 70);
  // Slots that no sequence advanced, gaps between slots included, keep their bits.
  for (int64_t slot = 0; slot < problem.pool; ++slot) {
    const bool written = slot == problem.slots[0] || slot == problem.slots[3];
    const int64_t begin = slot * problem.slot_stride + (written ? s.HV * s.DV * s.DK : 0);
    const int64_t end = (slot + 1) * problem.slot_stride;
    EXPECT_EQ(std::memcmp(&problem.state.f32[begin], &before.f32[begin], (end - begin) * sizeof(float)), 0)
        << slot;
  }
}

TEST(Prefill, PackedSequences) {
  const std::vector<int32_t> cu_seqlens = {3, 4, 4, 68, 133};  // three idle tokens, lengths 1, 0, 64, 65
  Shape s;
  s.N = 140, s.DV = kValueRows;  // seven idle tokens at the end
  s.gate = Gate::kChannel;
  Prefill problem(s, 9);
  problem.slots = {2, 0, 1, -1};
  for (float& e : problem.state.f32) e = problem.uniform(-1.0f, 1.0f);
  const Buffer before = problem.state;
  PrefillParams p = problem.params();
  p.B = 4;
  p.cu_seqlens = cu_seqlens.data();
  problem.prefill(p);
  problem.expect_zero(0, 0, 3);
  problem.expect_zero(0, 68, 140);
  for (const int64_t b : {0, 1, 2}) {
    problem.expect_sequence(b, 0, cu_seqlens[b], cu_seqlens[b + 1] - cu_seqlens[b], before);
  }
}

// Two calls, the state carried between them, follow the same sequence.
TEST(Prefill, ContinuesFromItsState) {
  Shape s;
  s.N = 120, s.DV = kValueRows;
  Prefill problem(s, 11);
  const Buffer before = problem.state;
  PrefillParams p = problem.params();
  p.T = 50;
  problem.prefill(p);
  const Buffer head = problem.out;
  problem.fill_common(p, problem.state, 50);
  p.T = 70;
  problem.prefill(p);
  problem.out.f32.insert(problem.out.f32.begin(), head.f32.begin(), head.f32.end());
  problem.expect_sequence(0, 0, 0, s.N, before);
}

// Tokens in front of one that is not finite keep their bits; all after it know.
TEST(Prefill, NonFiniteTokensReachOnlyLaterOnes) {
  unsigned seed = 20;
  for (const Gate gate : kGates) {
    for (const Update update : kUpdates) {
      Shape s;
      s.N = 75, s.DV = kValueRows, s.HV = 1, s.gate = gate, s.update = update;
      Prefill problem(s, seed++);
      const Buffer state = problem.state;
      problem.prefill(problem.params());
      const Buffer want = problem.out;
      for (const int64_t token : {3, 37, 74}) {
        for (float* entry : {&problem.k.buffer.f32[problem.k.at(0, token, 0, 3)],
                             &problem.v.buffer.f32[problem.v.at(0, token, 0, 20)]}) {
          const float good = *entry;
          *entry = kNaN;
          problem.state = state;
          problem.prefill(problem.params());
          *entry = good;
          const int64_t before = token * s.DV;
          EXPECT_EQ(std::memcmp(problem.out.data(), want.data(), before * sizeof(float)), 0) << token;
          for (int64_t t = token; t < s.N; ++t) EXPECT_TRUE(std::isnan(problem.out[t * s.DV + 20])) << t;
        }
      }
    }
  }
}

// A sequence has the same bits alone, in a batch of others and packed between them.
TEST(Prefill, SequencesDoNotMeet) {
  for (const Gate gate : kGates) {
    Shape s;
    s.B = 3, s.N = 90, s.DV = kValueRows, s.gate = gate;
    Prefill batch(s, 10);
    const Buffer before = batch.state;
    const std::vector<int32_t> lengths = {40, 77, 90};
    PrefillParams p = batch.params();
    p.lengths = lengths.data();
    batch.prefill(p);
    const Buffer want = batch.out;
    for (int64_t b = 0; b < s.B; ++b) {
      Buffer state = before, out(DType::kFloat32, lengths[b] * s.HV * s.DV);
      PrefillParams alone = batch.params();
      batch.only_row(alone, b);
      alone.T = lengths[b];
      alone.state.data = state.data();
      alone.out = out.data();
      ASSERT_EQ(batch.call(alone), Status::kOk);
      const int64_t at = batch.state_at(b), size = s.HV * s.DV * s.DK;
      EXPECT_EQ(std::memcmp(&state.f32[at], &batch.state.f32[at], size * sizeof(float)), 0)
          << "sequence " << b;
      EXPECT_EQ(std::memcmp(out.data(), &want.f32[b * s.N * s.HV * s.DV], out.bytes()), 0)
          << "sequence " << b;
    }
  }
}

// bfloat16 queries, keys, values and state: the same float32 arithmetic, rounded once on the way out.
TEST(Prefill, BFloat16RoundsOnce) {
  Shape s;
  s.N = 80, s.DV = kValueRows;
  Prefill wide(s, 12);
  s.dtype = s.state = DType::kBFloat16;
  Prefill narrow(s, 12);
  const auto widen_all = [](const Buffer& from, Buffer& to) {
    for (size_t i = 0; i < to.f32.size(); ++i) to.f32[i] = static_cast<float>(from[i]);
  };
  widen_all(narrow.q.buffer, wide.q.buffer);
  widen_all(narrow.k.buffer, wide.k.buffer);
  widen_all(narrow.v.buffer, wide.v.buffer);
  widen_all(narrow.state, wide.state);
  wide.prefill(wide.params());
  narrow.prefill(narrow.params());
  const auto round = [](float x) -> uint16_t {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  };
  for (size_t i = 0; i < narrow.out.half.size(); ++i) {
    ASSERT_EQ(narrow.out.half[i], round(wide.out.f32[i])) << i;
  }
  for (int64_t i = 0; i < s.HV * s.DV * s.DK; ++i) {
    const int64_t at = wide.state_at(0) + i;
    ASSERT_EQ(narrow.state.half[at], round(wide.state.f32[at])) << i;
  }
}

}  // namespace
}  // namespace specdec::test
