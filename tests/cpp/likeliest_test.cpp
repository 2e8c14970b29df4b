// The likeliest tokens of a row, through the C++ entry point: against a sort and sums in double, and rows
// that are no distributions. CTest runs this file once per instruction set (SPECDEC_CPU_ISA).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "ops.h"

namespace specdec {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr double kRoundoff = 0x1p-24;

struct Found {
  std::vector<int64_t> tokens;
  std::vector<float> probs;
};

// `logits` [R, V] lie between numbers that would be the largest.
Found likeliest(const std::vector<float>& logits, int64_t R, int64_t K, const float* scale = nullptr) {
  std::vector<float> fenced(logits.size() + 32, kInf);
  std::copy(logits.begin(), logits.end(), fenced.begin() + 16);
  LikeliestParams p;
  p.R = R;
  p.V = static_cast<int64_t>(logits.size()) / R;
  p.K = K;
  p.logits = fenced.data() + 16;
  p.scale = scale;
  Found found{std::vector<int64_t>(R * K, 12345), std::vector<float>(R * K, kNaN)};
  p.tokens = found.tokens.data();
  p.probs = found.probs.data();
  EXPECT_EQ(cpu::likeliest(p), Status::kOk);
  return found;
}

void expect_row(const float* row, int64_t V, int64_t K, double scale, const int64_t* tokens,
                const float* probs) {
  std::vector<int64_t> order(V);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return row[a] > row[b]; });
  const double top = row[order[0]];
  double sum = 0, moved = 0;  // moved: of the sum, for every relative error of the exponents
  for (int64_t i = 0; i < V; ++i) {
    const double exponent = scale * (row[i] - top), weight = std::exp(exponent);
    sum += weight;
    if (weight > 0) moved -= weight * exponent;
  }
  for (int64_t i = 0; i < K; ++i) {
    if (i >= V || row[order[i]] == -kInf) {
      EXPECT_EQ(tokens[i], -1) << i;
      EXPECT_EQ(probs[i], 0.0f) << i;
      continue;
    }
    EXPECT_EQ(tokens[i], order[i]) << i;
    const double exponent = scale * (row[order[i]] - top), want = std::exp(exponent) / sum;
    // Two roundings of every exponent, two of an exponential, V of their sum and one of the quotient.
    const double relative = kRoundoff * (2 * -exponent + 2 + 2 * moved / sum + 2 + V + 1);
    EXPECT_NEAR(probs[i], want, want * relative * (1 + relative) + 0x1p-126) << i;
  }
}

// Steps of a quarter, so that there are ties, a quarter of them -inf.
std::vector<float> random_logits(int64_t count, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& v : values) v = engine() % 4 == 0 ? -kInf : std::round(normal(engine) * 12) / 4;
  return values;
}

TEST(Likeliest, IsTheTopOfASortAndItsSoftmax) {
  const float scales[] = {1.0f, 0.25f, 3.0f};
  for (const int64_t V : {1, 3, 16, 63, 64, 65, 127, 130, 1000, 4099}) {
    for (const int64_t K : {1, 4, 64}) {
      const std::vector<float> logits = random_logits(3 * V, static_cast<uint32_t>(V + K));
      for (const float* scale : {static_cast<const float*>(nullptr), scales}) {
        const Found found = likeliest(logits, 3, K, scale);
        for (int64_t r = 0; r < 3; ++r) {
          SCOPED_TRACE("V " + std::to_string(V) + " K " + std::to_string(K) + " row " + std::to_string(r));
          const float* row = logits.data() + r * V;
          if (*std::max_element(row, row + V) == -kInf) {
            EXPECT_EQ(found.tokens[r * K], -1);
            continue;
          }
          expect_row(row, V, K, scale == nullptr ? 1.0 : scale[r], &found.tokens[r * K], &found.probs[r * K]);
        }
      }
    }
  }
}

// In the lanes of a vector, behind the last whole one and in every segment.
TEST(Likeliest, NothingOfARowThatIsNoDistribution) {
  constexpr int64_t kV = 203, kK = 3;
  std::vector<float> logits = random_logits(kV, 1);
  logits[5] = 2.0f;
  for (const float bad : {kNaN, kInf}) {
    for (int64_t place = 0; place < kV; ++place) {
      std::vector<float> row = logits;
      row[place] = bad;
      const Found found = likeliest(row, 1, kK);
      EXPECT_EQ(found.tokens, std::vector<int64_t>(kK, -1)) << bad << " at " << place;
      EXPECT_EQ(found.probs, std::vector<float>(kK, 0.0f)) << bad << " at " << place;
    }
  }
  for (const float all : {kNaN, kInf, -kInf}) {
    EXPECT_EQ(likeliest(std::vector<float>(kV, all), 1, kK).tokens, std::vector<int64_t>(kK, -1)) << all;
  }
}

TEST(Likeliest, EqualOnesByToken) {
  std::vector<float> logits(300, 0.0f);
  for (size_t i = 0; i < logits.size(); i += 2) logits[i] = -0.0f;  // equal to 0
  const Found found = likeliest(logits, 1, kMostLikeliest);
  for (int64_t i = 0; i < kMostLikeliest; ++i) EXPECT_EQ(found.tokens[i], i);
}

}  // namespace
}  // namespace specdec
