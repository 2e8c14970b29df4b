// Acceptance and sampling of the CPU backend, and the elementary functions of sampling_math.h.
#include <string>

#include "ops.h"
#include "specdec/acceptance_params.h"

namespace specdec::test {

struct TestBackend {
  static constexpr int64_t kMostV = INT64_MAX;
  static constexpr int kRepeats = 8;

  template <typename Regions>
  static Status call(const AcceptGreedyParams& p, const Regions&) {
    return cpu::accept_greedy(p);
  }
  template <typename Regions>
  static Status call(const AcceptSampledParams& p, const Regions&) {
    return cpu::accept_sampled(p);
  }
  template <typename Regions>
  static Status call(const SamplingProbsParams& p, const Regions&) {
    return cpu::sampling_probs(p);
  }
  template <typename Regions>
  static Status call(const DrawParams& p, const Regions&) {
    return cpu::draw_tokens(p);
  }
};

}  // namespace specdec::test

#include "acceptance_suite.h"
#include "isa_bits.h"

namespace specdec::test {

IsaBits* isa_bits = nullptr;

namespace {

// Calls f with what each instruction set that runs here makes of a kernel's parts.
template <typename F>
void for_each_isa(const F& f) {
  int found = 0;
  for (const IsaBits* bits = isa_bits; bits != nullptr; bits = bits->next) {
    const std::string name = bits->name, here = cpu::isa_name();
    if (name != "portable" && here != "avx512" && name != here) continue;
    SCOPED_TRACE(name);
    f(*bits);
    ++found;
  }
  EXPECT_GT(found, 0);
}

// The vector form on every instruction set, bit for bit.
TEST(IsaBits, WeightsAreThoseOfOneNumber) {
  constexpr int64_t kCount = 1 << 16;
  std::vector<float> x(kCount), got(kCount);
  std::mt19937 rng(1);
  for (int repeat = 0; repeat < 8; ++repeat) {
    for (int64_t i = 0; i < kCount; ++i) {
      // Everything from -100 on, then ever smaller numbers.
      x[i] = -std::ldexp(std::uniform_real_distribution<float>(0.0f, 100.0f)(rng),
                         -repeat * static_cast<int>(i % 5));
    }
    const float special[] = {0.0f, -0.0f,   -87.0f,    -87.00001f, -INFINITY,
                             kNaN, -1e-45f, -0x1p-24f, -86.99999f};
    std::copy(std::begin(special), std::end(special), x.begin() + 5);
    for_each_isa([&](const IsaBits& bits) {
      bits.weights(x.data(), kCount, got.data());
      for (int64_t i = 0; i < kCount; ++i) ASSERT_EQ(got[i], weight_of(x[i])) << x[i];
    });
  }
}

// Sums of what is left after rejections, and of overlaps: whole segments and the rest, with and without the
// tokens of elder siblings.
TEST(IsaBits, SumsHaveOneOrder) {
  for (const int64_t V : {5, 128, 1000, 8192, 20011}) {
    std::mt19937 rng(static_cast<unsigned>(V));
    std::vector<float> logits(V);
    std::vector<std::vector<float>> q(3, std::vector<float>(V));
    const float* rows[3];
    for (float& x : logits) x = 3.0f * std::normal_distribution<float>()(rng);
    for (int c = 0; c < 3; ++c) {
      std::vector<float> near = logits;
      for (float& x : near) x += std::normal_distribution<float>()(rng);
      q[c] = Row(near, {}).probs;
      rows[c] = q[c].data();
    }
    const double factors[] = {1.0, 1.7, 2.9}, scales[] = {1.0, 1.01, 1.3};
    const int64_t siblings[] = {V / 2, 0, V - 1};
    for (const int64_t* tokens : {static_cast<const int64_t*>(nullptr), siblings}) {
      std::vector<double> left, overlap(V);
      for (const float p : Row(logits, {}).probs) left.push_back(p);
      for (int64_t i = 0; i < V; ++i) overlap[i] = std::min<double>(q[0][i], 0.6 * left[i]);
      for (int c = 0; c < 3; ++c) {
        for (int64_t i = 0; i < V; ++i) {
          const bool elder = tokens != nullptr && std::find(tokens, tokens + c, i) != tokens + c;
          left[i] = std::max(factors[c] * left[i] - scales[c] * (elder ? 0.0 : q[c][i]), 0.0);
        }
      }
      std::vector<double> want_parts;
      const double want = tree_sum(left, &want_parts);
      for_each_isa([&](const IsaBits& bits) {
        std::vector<double> parts(want_parts.size());
        EXPECT_EQ(bits.left(logits.data(), V, rows, factors, scales, tokens, 3, parts.data()), want);
        EXPECT_EQ(parts, want_parts);
        EXPECT_EQ(bits.overlap(logits.data(), V, rows[0], 0.6, parts.data()), tree_sum(overlap));
      });
    }
  }
}

// The polynomial is good to one unit of 2^-24, the reduction and the products round about as much again.
TEST(SamplingMath, WeightOfIsExp) {
  for (float x = -87.0f; x < 0.0f; x = std::nextafter(x * 0.9999f, 0.0f)) {
    const double want = std::exp(static_cast<double>(x));
    ASSERT_NEAR(weight_of(x), want, 0x1.8p-23 * want) << x;
    if (x > -1e-12f) break;
  }
  EXPECT_EQ(weight_of(0.0f), 1.0f);
  EXPECT_EQ(weight_of(-0.0f), 1.0f);
  EXPECT_EQ(weight_of(-87.5f), 0.0f);
  EXPECT_EQ(weight_of(-INFINITY), 0.0f);
  EXPECT_EQ(weight_of(kNaN), 0.0f);
}

TEST(SamplingMath, ExponentialIsMinusLog) {
  std::mt19937_64 rng(1);
  EXPECT_EQ(exponential(0.0), 0.0);
  for (int i = 0; i < 200000; ++i) {
    double u = static_cast<double>(rng() >> 11) * 0x1p-53;
    if (i % 3 == 0) u = std::ldexp(u, -(i % 50));  // small ones
    if (i % 3 == 1) u = 1.0 - std::ldexp(u, -(i % 40));
    u = std::min(std::floor(u * 0x1p53) * 0x1p-53, 1.0 - 0x1p-53);
    const double want = -std::log1p(-u);
    ASSERT_NEAR(exponential(u), want, 4 * 0x1p-53 * want) << u;
    ASSERT_GE(exponential(u), u * (1.0 - 0x1p-48));
  }
}

TEST(SamplingMath, RanksAreTheOrderOfNumbers) {
  const float x[] = {-INFINITY, -3e38f, -1.0f, -1e-45f, 0.0f, 1e-45f, 0.5f, 3e38f, INFINITY};
  for (int i = 0; i + 1 < 9; ++i) EXPECT_LT(rank_of(x[i]), rank_of(x[i + 1])) << x[i];
  EXPECT_EQ(rank_of(-0.0f), rank_of(0.0f));
}

TEST(SamplingMath, TheGoalOfANucleusIsReached) {
  EXPECT_EQ(mass_goal(100, 0.5f), 50u);
  EXPECT_EQ(mass_goal(101, 0.5f), 51u);
  EXPECT_EQ(mass_goal(uint64_t{1} << 40, 1e-30f), 1u);
}

// Every way to make a weight gives one number: rows that are long enough for whole vectors, for single
// elements, and both together.
TEST(SamplingProbs, WeightsOfManyNumbers) {
  for (const int64_t V : {1 << 16, (1 << 16) + 77}) {
    std::vector<float> logits(V), probs(V);
    std::mt19937 rng(static_cast<unsigned>(V));
    for (int repeat = 0; repeat < 12; ++repeat) {
      const float range = std::ldexp(1.0f, repeat - 4);
      for (float& x : logits) x = -range * std::uniform_real_distribution<float>()(rng);
      const float temperature = 1.0f, top_p = 1.0f, min_p = 0.0f;
      const int32_t top_k = 0;
      SamplingProbsParams p;
      p.R = 1, p.V = V, p.logits = logits.data(), p.stride = V, p.probs = probs.data();
      p.sampling = {&temperature, &top_k, &top_p, &min_p};
      ASSERT_EQ(cpu::sampling_probs(p), Status::kOk);
      ASSERT_EQ(probs, Row(logits, {}).probs) << range;
    }
  }
}

// A long row on several threads, its filters with it.
TEST(AcceptSampled, LongRows) {
  Round round(7, 4, 150001, true, DType::kBFloat16, 51);
  round.check_sampled();
  round.draft_greedily();
  round.check_greedy();
  for (int64_t b = 0; b < round.B; ++b) {
    Round one(1, 3, 70000, false, DType::kFloat32, 60 + static_cast<unsigned>(b));
    one.rules = {static_cast<int32_t>(b % 6)};
    one.set(0, round.settings(b));
    one.draft();
    one.check_sampled();
  }
}

}  // namespace
}  // namespace specdec::test
