// The arithmetic of sampling, to the bit, for every backend: products and sums are never fused (contraction
// is off wherever this is compiled), so that a row, a test and a draw come out alike on a CPU, in the
// executor and on a GPU.
//
// A row of logits l with greatest l_max becomes
//   weight(x) = weight_of((l(x) - l_max) * (1 / temperature)) where x is kept, 0 elsewhere   float32
//   p(x)      = weight(x) * float32(1 / sum of the weights)                                  float32
// and everything that follows from p, and from a drafter's q, is float64.
//
// Kept are, in this order: the top_k largest logits; the fewest of those, largest first, whose mass reaches
// top_p of theirs, the mass of a token being the integer mass_of(weight); those whose weight is at least
// min_p. Equal logits are ranked by token. Temperature 0 is top_k = 1 at temperature 1.
//
// A sum over a row is a tree that depends on V alone. A segment is kSegment elements (0 beyond the row); lane
// l of its kLanes lanes adds elements l, l + 32, l + 64 and l + 96 in this order, and lanes are halved (lane
// l adds lane l + 16, then l + 8, 4, 2, 1). The segments of a part are added in order, and so are the parts.
#pragma once

#include <cstdint>

#include "specdec/host_device.h"

namespace specdec {

constexpr int kSegment = 128;  // elements
constexpr int kLanes = 32;     // of a segment
constexpr int kPart = 64;      // segments of a part
constexpr int kPartElements = kSegment * kPart;

SPECDEC_COMMON_FUNCTION int parts_of(int64_t V) {
  return static_cast<int>((V + kPartElements - 1) / kPartElements);
}

// What weight_of is made of, for backends that have it on vectors.
struct WeightOf {
  static constexpr float kLeast = -87.0f;
  static constexpr float kRound = 0x1.8p23f;           // adding it leaves round(y) in the low bits
  static constexpr uint32_t kRoundBits = 0x4b400000u;  // the bits of kRound
  static constexpr float kInverseLn2 = 0x1.715476p0f;
  // ln 2 as kLn2 - kLn2Excess: n times the first is exact.
  static constexpr float kLn2 = 0.693359375f, kLn2Excess = 2.12194440e-4f;
  static constexpr float kP7 = 1.9875691500e-4f, kP6 = 1.3981999507e-3f, kP5 = 8.3334519073e-3f,
                         kP4 = 4.1665795894e-2f, kP3 = 1.6666665459e-1f, kP2 = 5.0000001201e-1f;
};

// e^x for x <= 0 to about two units in the last place; exactly 1 at 0, 0 below -87. x = n ln 2 + r with
// |r| <= ln(2)/2; e^r by a polynomial of degree 7 (Cephes expf).
SPECDEC_COMMON_FUNCTION float weight_of(float x) {
  using W = WeightOf;
  if (!(x >= W::kLeast)) return 0.0f;
  const float shifted = x * W::kInverseLn2 + W::kRound;
  const float n = shifted - W::kRound;
  float r = x - n * W::kLn2;
  r = r + n * W::kLn2Excess;
  float p = W::kP7;
  p = p * r + W::kP6;
  p = p * r + W::kP5;
  p = p * r + W::kP4;
  p = p * r + W::kP3;
  p = p * r + W::kP2;
  p = p * (r * r) + r;
  p = p + 1.0f;
  uint32_t bits;
  __builtin_memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits - W::kRoundBits + 127u) << 23;  // 2^n, n from -126 on
  float scale;
  __builtin_memcpy(&scale, &bits, sizeof(scale));
  return p * scale;
}

// A weight, at most 1, in units of 2^-40: integers add up alike in every order.
SPECDEC_COMMON_FUNCTION uint64_t mass_of(float weight) { return static_cast<uint64_t>(weight * 0x1p40f); }

// The mass that a nucleus has to reach.
SPECDEC_COMMON_FUNCTION uint64_t mass_goal(uint64_t total, float top_p) {
  const double goal = static_cast<double>(total) * static_cast<double>(top_p);
  const uint64_t floor = static_cast<uint64_t>(goal);
  return static_cast<double>(floor) < goal ? floor + 1 : floor;
}

// Logits in the order of numbers as unsigned integers; -0 equals 0.
SPECDEC_COMMON_FUNCTION uint32_t rank_of(float logit) {
  logit += 0.0f;
  uint32_t bits;
  __builtin_memcpy(&bits, &logit, sizeof(bits));
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The logit of a rank.
SPECDEC_COMMON_FUNCTION float logit_of(uint32_t rank) {
  const uint32_t bits = rank >> 31 ? rank & 0x7fffffffu : ~rank;
  float logit;
  __builtin_memcpy(&logit, &bits, sizeof(logit));
  return logit;
}

// Above that of every number, which NaN's bits are not.
constexpr uint32_t kRankOfNaN = 0xffffffffu;
SPECDEC_COMMON_FUNCTION uint32_t rank_or_nan(float logit) {
  return logit != logit ? kRankOfNaN : rank_of(logit);
}
SPECDEC_COMMON_FUNCTION bool is_finite_rank(uint32_t rank) {
  return rank > rank_of(-__builtin_inff()) && rank < rank_of(__builtin_inff());
}

// A temperature so small that its inverse is infinite shares the mass among the largest.
SPECDEC_COMMON_FUNCTION float inverse_of(float temperature) {
  if (!(temperature > 0.0f)) return 1.0f;
  const float inverse = 1.0f / temperature;
  return inverse < 0x1.fffffep127f ? inverse : 0x1.fffffep127f;
}

// What it takes to make an element of a row, and which are kept.
struct RowScale {
  float largest = 0.0f;            // the greatest logit
  float inverse_t = 1.0f;          // 1 / temperature
  float inverse_sum = 1.0f;        // float32(1 / sum of the weights)
  float min_weight = 0.0f;         // min_p
  uint32_t last_rank = 0;          // kept: rank_of greater, or equal and ...
  int64_t last_token = INT64_MAX;  // ... the token at most this

  SPECDEC_COMMON_FUNCTION float weight(float logit, int64_t token) const {
    const uint32_t rank = rank_of(logit);
    if (rank < last_rank || (rank == last_rank && token > last_token)) return 0.0f;
    const float w = weight_of((logit - largest) * inverse_t);
    return w >= min_weight ? w : 0.0f;
  }
  SPECDEC_COMMON_FUNCTION float probability(float logit, int64_t token) const {
    return weight(logit, token) * inverse_sum;
  }
};

// The first of `count` entries at which their cumulative sum passes `rest`, which then counts from there.
// Entries without weight are skipped. A level's sums may round apart from its parent's: where the end is
// reached, the last positive entry is taken, so that a token without weight is never drawn.
template <typename Entry>
SPECDEC_COMMON_FUNCTION int descend(const Entry& entry, int count, double& rest) {
  int last = 0;
  double sum = 0.0, before_last = 0.0;
  for (int i = 0; i < count; ++i) {
    const double e = entry(i);
    if (!(e > 0.0)) continue;
    last = i;
    before_last = sum;
    sum += e;
    if (sum > rest) break;
  }
  rest -= before_last;
  return last;
}

// --- random numbers: specdec/acceptance/rng.py defines them ---

enum class RandomStream : uint32_t {
  kAccept,  // the test of a sibling at a position, by its rank
  kSample,  // the token drawn from the target at a position
  kDraft,   // a drafter's draws, by the position of the round
  kRound,   // tests of rules that look past the first rejection, by the position of the round and the node
  kRace,    // a drafter's draws without replacement, by the position of the round, node and token
};

// A draw is less than 2^33, and its low bits number a node's children or the tokens of a race below it.
constexpr int kDrawBits = 33, kDraftChildBits = 8, kRaceTokenBits = 21;
constexpr int kMaxDraws = 1 << kDraftChildBits;                   // independent, below a node
constexpr int kMaxDrawNodes = 1 << (kDrawBits - kRaceTokenBits);  // of a round whose drafts are drawn

// The number of a drafter's draw k, or of token k in a race, below a node.
SPECDEC_COMMON_FUNCTION uint64_t draw_of(int32_t node, int64_t k) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(node)) << kDraftChildBits) + static_cast<uint64_t>(k);
}
SPECDEC_COMMON_FUNCTION uint64_t race_of(int32_t node, int64_t token) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(node)) << kRaceTokenBits) +
         static_cast<uint64_t>(token);
}

// Philox4x32-10: the rounds, and what is added to the key after each.
constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxKey0 = 0x9E3779B9u, kPhiloxKey1 = 0xBB67AE85u;

SPECDEC_COMMON_FUNCTION void philox_round(uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3, uint32_t k0,
                                          uint32_t k1) {
  const uint64_t a = static_cast<uint64_t>(c0) * 0xD2511F53u;
  const uint64_t b = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
  c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
  c1 = static_cast<uint32_t>(b);
  c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
  c3 = static_cast<uint32_t>(a);
}

// The number in [0, 1) of a pair of words.
SPECDEC_COMMON_FUNCTION double unit_of(uint32_t low, uint32_t high) {
  return static_cast<double>((static_cast<uint64_t>(high) << 32 | low) >> 11) * 0x1p-53;
}

// One of the numbers in [0, 1); two draws share a counter.
SPECDEC_COMMON_FUNCTION double uniform(uint64_t seed, int64_t position, RandomStream stream, uint64_t draw) {
  uint32_t c0 = static_cast<uint32_t>(draw >> 1), c1 = static_cast<uint32_t>(stream);
  uint32_t c2 = static_cast<uint32_t>(position);
  uint32_t c3 = static_cast<uint32_t>(static_cast<uint64_t>(position) >> 32);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round, k0 += kPhiloxKey0, k1 += kPhiloxKey1) {
    philox_round(c0, c1, c2, c3, k0, k1);
  }
  return (draw & 1) != 0 ? unit_of(c2, c3) : unit_of(c0, c1);
}

// -ln(1 - u) for a number of `uniform`, to about two units in the last place. 1 - u = 2^e m with m from
// sqrt(1/2) to sqrt(2), and ln m = 2 atanh(s) with s = (m - 1) / (m + 1), at most 0.172, by its series.
SPECDEC_COMMON_FUNCTION double exponential(double u) {
  const double x = 1.0 - u;  // exact
  uint64_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  int e = static_cast<int>(bits >> 52) - 1023;
  bits = (bits & 0xfffffffffffffu) | 0x3ff0000000000000u;
  double m;
  __builtin_memcpy(&m, &bits, sizeof(m));
  if (m > 0x1.6a09e667f3bcdp+0) {
    m = 0.5 * m;
    ++e;
  }
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double p = 1.0 / 21.0;
  p = p * z + 1.0 / 19.0;
  p = p * z + 1.0 / 17.0;
  p = p * z + 1.0 / 15.0;
  p = p * z + 1.0 / 13.0;
  p = p * z + 1.0 / 11.0;
  p = p * z + 1.0 / 9.0;
  p = p * z + 1.0 / 7.0;
  p = p * z + 1.0 / 5.0;
  p = p * z + 1.0 / 3.0;
  const double twice = 2.0 * s;
  // ln 2 in two parts: e times the first is exact.
  const double low = p * z * twice + e * 0x1.ef35793c7673p-45;
  return -((low + twice) + e * 0x1.62e42fefa38p-1);
}

// When a token of probability q > 0 arrives in the race.
SPECDEC_COMMON_FUNCTION double arrival_of(double u, float q) {
  return exponential(u) / static_cast<double>(q);
}

}  // namespace specdec
