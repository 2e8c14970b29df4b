// prefill against the sequential recurrence in float64.
#include <gtest/gtest.h>

#include <cstring>

#include "ops.h"
#include "recurrence_problem.h"

namespace specdec {
namespace {

class Prefill : public Problem {
 public:
  using Problem::Problem;

  PrefillParams params() {
    PrefillParams p;
    fill_common(p);
    p.T = s.N;
    return p;
  }

  // Rows of `out` start at token `first` of row b; S0 is the state before the call.
  void expect_sequence(int64_t b, int64_t row, int64_t first, int64_t n, const std::vector<float>& before) {
    for (int64_t hv = 0; hv < s.HV; ++hv) {
      const float* S0 = &before[slots[b] * slot_stride + hv * s.DV * s.DK];
      const Truth t = truth(row, first, n, hv, nullptr, S0);
      const double out_tolerance = t.tolerance(s.DK, n, t.row_norm * t.q_norm);
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t r = 0; r < s.DV; ++r) {
          const float got = out[((row * s.N + first + i) * s.HV + hv) * s.DV + r];
          ASSERT_LE(std::abs(got - t.out[i * s.DV + r]), out_tolerance)
              << "sequence " << b << " token " << i << " head " << hv << " row " << r << " got " << got
              << " want " << t.out[i * s.DV + r];
        }
      }
      const double state_tolerance = t.tolerance(s.DK, n, t.row_norm);
      for (int64_t i = 0; i < s.DV * s.DK; ++i) {
        ASSERT_LE(std::abs(state_of(b, hv)[i] - t.state[i]), state_tolerance)
            << "sequence " << b << " head " << hv << " state " << i << " got " << state_of(b, hv)[i]
            << " want " << t.state[i];
      }
    }
  }

  void expect_zero(int64_t row, int64_t first, int64_t end) {
    for (int64_t i = (row * s.N + first) * s.HV * s.DV; i < (row * s.N + end) * s.HV * s.DV; ++i) {
      ASSERT_EQ(out[i], 0.0f) << i;
    }
  }
};

TEST(Prefill, FollowsReference) {
  unsigned seed = 0;
  for (const Gate gate : kGates) {
    for (const Update update : kUpdates) {
      for (const int64_t T : {1, 7, 32, 33, 63, 64, 65, 200}) {
        Shape s;
        s.N = T, s.gate = gate, s.update = update;
        s.DK = 16 * (1 + seed % 5), s.DV = 17 + 13 * (seed % 4);
        s.l2norm = seed % 3 > 0;
        s.HV = 1 + seed % 2;
        SCOPED_TRACE(testing::Message()
                     << "gate " << static_cast<int>(gate) << " update " << static_cast<int>(update) << " T "
                     << T << " DK " << s.DK << " DV " << s.DV);
        Prefill problem(s, seed++);
        const std::vector<float> before = problem.state;
        ASSERT_EQ(cpu::prefill(problem.params()), Status::kOk);
        problem.expect_sequence(0, 0, 0, T, before);
      }
    }
  }
}

TEST(Prefill, LongSequence) {
  for (const Gate gate : {Gate::kHead, Gate::kChannel}) {
    Shape s;
    s.N = 1000, s.DK = 64, s.gate = gate, s.HV = 1;
    Prefill problem(s, 5);
    const std::vector<float> before = problem.state;
    ASSERT_EQ(cpu::prefill(problem.params()), Status::kOk);
    problem.expect_sequence(0, 0, 0, s.N, before);
  }
}

TEST(Prefill, ModelShape) {
  Shape s;
  s.B = 2, s.N = 70, s.HK = 2, s.HV = 4, s.DK = 128, s.DV = 256;
  Prefill problem(s, 6);
  const std::vector<float> before = problem.state;
  ASSERT_EQ(cpu::prefill(problem.params()), Status::kOk);
  for (int64_t b = 0; b < s.B; ++b) problem.expect_sequence(b, b, 0, s.N, before);
}

TEST(Prefill, PaddedRowsAreZeroAndUnread) {
  Shape s;
  s.B = 4, s.N = 70, s.HK = 2;
  Prefill problem(s, 8);
  problem.slots[1] = -1;
  const std::vector<int32_t> lengths = {65, 70, 0, 99};
  const auto poison = [&](int64_t b, int64_t from) {
    std::fill(&problem.k[b * problem.key_stride.b + from * problem.key_stride.n],
              problem.k.data() + (b + 1) * problem.key_stride.b, kNaN);
    std::fill(&problem.g[b * problem.gate_stride.b + from * problem.gate_stride.n],
              problem.g.data() + (b + 1) * problem.gate_stride.b, kNaN);
  };
  poison(0, 65);
  poison(1, 0);
  poison(2, 0);
  const std::vector<float> before = problem.state;
  PrefillParams p = problem.params();
  p.lengths = lengths.data();
  ASSERT_EQ(cpu::prefill(p), Status::kOk);
  problem.expect_sequence(0, 0, 0, 65, before);
  problem.expect_sequence(3, 3, 0, 70, before);
  problem.expect_zero(0, 65, 70);
  problem.expect_zero(1, 0, 70);
  problem.expect_zero(2, 0, 70);
  // Slots that no sequence advanced, gaps between slots included, keep their bits.
  for (int64_t slot = 0; slot < problem.slots_total; ++slot) {
    const bool written = slot == problem.slots[0] || slot == problem.slots[3];
    const int64_t begin = slot * problem.slot_stride + (written ? s.HV * s.DV * s.DK : 0);
    const int64_t end = (slot + 1) * problem.slot_stride;
    EXPECT_EQ(std::memcmp(&problem.state[begin], &before[begin], (end - begin) * sizeof(float)), 0) << slot;
  }
}

TEST(Prefill, PackedSequences) {
  const std::vector<int32_t> cu_seqlens = {3, 4, 4, 68, 133};  // three idle tokens, lengths 1, 0, 64, 65
  Shape s;
  s.N = 140;  // seven idle tokens at the end
  s.gate = Gate::kChannel;
  Prefill problem(s, 9);
  problem.slots = {2, 0, 1, -1};
  for (float& e : problem.state) e = problem.normal();
  problem.slots_total = 3;
  const std::vector<float> before = problem.state;
  PrefillParams p = problem.params();
  p.B = 4;
  p.cu_seqlens = cu_seqlens.data();
  ASSERT_EQ(cpu::prefill(p), Status::kOk);
  problem.expect_zero(0, 0, 3);
  problem.expect_zero(0, 68, 140);
  for (const int64_t b : {0, 1, 2}) {
    problem.expect_sequence(b, 0, cu_seqlens[b], cu_seqlens[b + 1] - cu_seqlens[b], before);
  }
}

// A sequence has the same bits alone, in a batch of others and packed between them.
TEST(Prefill, SequencesDoNotMeet) {
  for (const Gate gate : kGates) {
    Shape s;
    s.B = 3, s.N = 90, s.DV = 96, s.gate = gate;
    Prefill batch(s, 10);
    const std::vector<float> before = batch.state;
    const std::vector<int32_t> lengths = {40, 77, 90};
    PrefillParams p = batch.params();
    p.lengths = lengths.data();
    ASSERT_EQ(cpu::prefill(p), Status::kOk);
    const std::vector<float> want = batch.out;
    for (int64_t b = 0; b < s.B; ++b) {
      std::vector<float> state = before, out(lengths[b] * s.HV * s.DV, kNaN);
      PrefillParams alone = batch.params();
      alone.B = 1;
      alone.T = lengths[b];
      alone.q = batch.q.data() + b * batch.key_stride.b;
      alone.k = batch.k.data() + b * batch.key_stride.b;
      alone.v = batch.v.data() + b * batch.value_stride.b;
      if (alone.g != nullptr) alone.g = batch.g.data() + b * batch.gate_stride.b;
      alone.beta += b * batch.beta_stride.b;
      alone.slots = &batch.slots[b];
      alone.state.data = state.data();
      alone.out = out.data();
      ASSERT_EQ(cpu::prefill(alone), Status::kOk);
      const int64_t at = batch.slots[b] * batch.slot_stride, size = s.HV * s.DV * s.DK;
      EXPECT_EQ(std::memcmp(&state[at], &batch.state[at], size * sizeof(float)), 0) << "sequence " << b;
      EXPECT_EQ(std::memcmp(out.data(), &want[b * s.N * s.HV * s.DV], out.size() * sizeof(float)), 0)
          << "sequence " << b;
    }
  }
}

// Two calls, the state carried between them, follow the same sequence.
TEST(Prefill, ContinuesFromItsState) {
  Shape s;
  s.N = 120;
  Prefill problem(s, 11);
  const std::vector<float> before = problem.state;
  PrefillParams p = problem.params();
  p.T = 50;
  ASSERT_EQ(cpu::prefill(p), Status::kOk);
  p.T = 70;
  p.q = problem.q.data() + 50 * problem.key_stride.n;
  p.k = problem.k.data() + 50 * problem.key_stride.n;
  p.v = problem.v.data() + 50 * problem.value_stride.n;
  p.g = problem.g.data() + 50 * problem.gate_stride.n;
  p.beta = problem.beta.data() + 50 * problem.beta_stride.n;
  p.out = problem.out.data() + 50 * s.HV * s.DV;
  ASSERT_EQ(cpu::prefill(p), Status::kOk);
  problem.expect_sequence(0, 0, 0, s.N, before);
}

// bfloat16 queries, keys, values and state: the same float32 arithmetic, rounded once on the way out.
TEST(Prefill, BFloat16RoundsOnce) {
  Shape s;
  s.N = 80, s.DV = 40;
  Prefill problem(s, 12);
  const auto round = [](float x) -> uint16_t {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  };
  const auto narrow = [&](std::vector<float>& x) {
    std::vector<uint16_t> bits;
    for (float& e : x) {
      bits.push_back(round(e));
      const uint32_t wide = static_cast<uint32_t>(bits.back()) << 16;
      std::memcpy(&e, &wide, 4);
    }
    return bits;
  };
  const std::vector<uint16_t> q = narrow(problem.q), k = narrow(problem.k), v = narrow(problem.v);
  std::vector<uint16_t> state = narrow(problem.state);
  PrefillParams p = problem.params();
  ASSERT_EQ(cpu::prefill(p), Status::kOk);
  std::vector<uint16_t> out(problem.out.size());
  p.dtype = p.state.dtype = DType::kBFloat16;
  p.q = q.data(), p.k = k.data(), p.v = v.data();
  p.state.data = state.data();
  p.out = out.data();
  ASSERT_EQ(cpu::prefill(p), Status::kOk);
  for (size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], round(problem.out[i])) << i;
  const int64_t at = problem.slots[0] * problem.slot_stride;
  for (int64_t i = at; i < at + s.HV * s.DV * s.DK; ++i) ASSERT_EQ(state[i], round(problem.state[i])) << i;
}

// Tokens in front of one that is not finite keep their bits.
TEST(Prefill, NonFiniteTokensReachOnlyLaterOnes) {
  unsigned seed = 20;
  for (const Gate gate : kGates) {
    for (const Update update : kUpdates) {
      Shape s;
      s.N = 75, s.DV = 45, s.gate = gate, s.update = update;
      Prefill problem(s, seed++);
      const std::vector<float> state = problem.state;
      ASSERT_EQ(cpu::prefill(problem.params()), Status::kOk);
      const std::vector<float> want = problem.out;
      for (const int64_t token : {3, 37, 74}) {
        for (float* entry : {&problem.k[token * problem.key_stride.n + 3],
                             &problem.v[token * problem.value_stride.n + 40]}) {
          const float good = *entry;
          *entry = kNaN;
          problem.state = state;
          ASSERT_EQ(cpu::prefill(problem.params()), Status::kOk);
          *entry = good;
          const int64_t before = token * s.HV * s.DV;
          EXPECT_EQ(std::memcmp(problem.out.data(), want.data(), before * sizeof(float)), 0) << token;
          EXPECT_TRUE(std::isnan(problem.out[before + 40]));
        }
      }
    }
  }
}

TEST(Prefill, RefusesWhatItCannotRun) {
  Prefill problem(Shape{}, 1);
  PrefillParams p = problem.params();
  p.rec.HK = 3;
  EXPECT_EQ(cpu::prefill(p), Status::kInvalidArgument);
  p = problem.params();
  p.g = nullptr;
  EXPECT_EQ(cpu::prefill(p), Status::kInvalidArgument);
  p = problem.params();
  p.rec.DK = 24;
  EXPECT_EQ(cpu::prefill(p), Status::kUnsupported);
  p = problem.params();
  p.state.dtype = DType::kFloat16;
  EXPECT_EQ(cpu::prefill(p), Status::kUnsupported);
}

}  // namespace
}  // namespace specdec
