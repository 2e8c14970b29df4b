// A row to sample from, and the sums of sampling_math.h over what is made of it. Whatever is summed is an
// `Elements`:
//   double at(int64_t i) const            element i
//   DoublePair pair(int64_t i) const      elements i .. i + Vec::kWidth, with the same bits
//   bool plain(int64_t segment) const     no element of the segment that starts there wants `at`
#pragma once

#include <algorithm>

#include "parallel.h"
#include "simd_double.h"
#include "specdec/sampling_math.h"

namespace specdec::cpu::SPECDEC_ISA {

// Of a row and what is summed over it, in multiply-adds of `parallel_for`, an element.
constexpr int64_t kElementWork = 4;

// Types of this namespace: an algorithm that is given one is compiled for this instruction set alone.
struct Ascending {
  template <typename T>
  bool operator()(T a, T b) const {
    return a < b;
  }
};
struct Descending {
  template <typename T>
  bool operator()(T a, T b) const {
    return b < a;
  }
};

// The place of a token among `count`; `count` where it is not there.
inline int64_t place_of(int64_t token, const int64_t* tokens, int64_t count) {
  int64_t i = 0;
  while (i < count && tokens[i] != token) ++i;
  return i;
}

// Whether one of the tokens lies in the segment.
inline bool any_in_segment(const int64_t* tokens, int64_t count, int64_t segment) {
  for (int64_t i = 0; i < count; ++i) {
    if (tokens[i] >= segment && tokens[i] < segment + kSegment) return true;
  }
  return false;
}

// specdec::weight_of, bit for bit.
SPECDEC_INLINE Vec weight_of(Vec x) {
  using W = WeightOf;
  typedef uint32_t Bits __attribute__((vector_size(Vec::kWidth * 4)));
  const Vec round = Vec::set(W::kRound);
  const Vec shifted = x * Vec::set(W::kInverseLn2) + round;
  const Vec n = shifted - round;
  Vec r = x - n * Vec::set(W::kLn2);
  r = r + n * Vec::set(W::kLn2Excess);
  Vec p = Vec::set(W::kP7);
  p = p * r + Vec::set(W::kP6);
  p = p * r + Vec::set(W::kP5);
  p = p * r + Vec::set(W::kP4);
  p = p * r + Vec::set(W::kP3);
  p = p * r + Vec::set(W::kP2);
  p = p * (r * r) + r;
  p = p + Vec::set(1.0f);
  const Bits bits = ((Bits)shifted.x - W::kRoundBits + 127u) << 23;
  Vec scale;
  std::memcpy(&scale.x, &bits, sizeof(bits));
  const Vec weight = p * scale;
  return {x.x >= Vec::set(W::kLeast).x ? weight.x : Vec::zero().x};
}

// The weights of a row of logits of type T. Logits are compared as numbers here, which is the order of their
// ranks.
template <typename T>
struct RowElements {
  const T* logits = nullptr;
  RowScale scale;
  bool filtered = false;  // some tokens are not kept
  float last = 0.0f;      // kept: greater logits, and equal ones up to scale.last_token

  float single(int64_t i) const { return scale.weight(to_float(logits[i]), i); }

  // The distance from the largest logit that `weight_of` takes.
  SPECDEC_INLINE Vec scaled(Vec logit) const {
    return (logit - Vec::set(scale.largest)) * Vec::set(scale.inverse_t);
  }
  SPECDEC_INLINE Vec vec(int64_t i) const { return kept(weight_of(scaled(Vec::load(logits + i))), i); }
  // Weights i .. i + Vec::kWidth, zero where the token is not kept.
  SPECDEC_INLINE Vec kept(Vec w, int64_t i) const {
    if (!filtered) return w;
    const Vec logit = Vec::load(logits + i), last_logit = Vec::set(last), least = Vec::set(scale.min_weight);
    const auto inside =
        i + Vec::kWidth - 1 <= scale.last_token ? logit.x >= last_logit.x : logit.x > last_logit.x;
    return {inside & (w.x >= least.x) ? w.x : Vec::zero().x};
  }
  // The vector form does not tell tokens of the last kept logit apart.
  bool plain(int64_t segment) const {
    return !filtered || scale.last_token < segment || scale.last_token >= segment + kSegment - 1;
  }
};

// Probabilities as they stand, those of tokens in `without` taken out.
struct GivenElements {
  const float* probs = nullptr;
  const int64_t* without = nullptr;
  int64_t count = 0;

  double at(int64_t i) const {
    return place_of(i, without, count) < count ? 0.0 : static_cast<double>(probs[i]);
  }
  SPECDEC_INLINE DoublePair pair(int64_t i) const { return widen(Vec::load(probs + i)); }
  bool plain(int64_t segment) const { return !any_in_segment(without, count, segment); }
};

// Calls f(b) for every sequence, side by side where they keep all threads busy, else one by one, as the
// passes over a long row then use the threads.
template <typename F>
void each_sequence(int64_t B, int64_t N, int64_t V, const F& f) {
  if (B < max_threads() && parts_of(V) > 1) {
    for (int64_t b = 0; b < B; ++b) f(b);
  } else {
    parallel_for(B, B * N * V * kElementWork, f);
  }
}

// Lanes halved until one is left.
SPECDEC_INLINE double sum_of_lanes(Doubles (&lanes)[kLanes / Doubles::kWidth]) {
  for (int half = kLanes / Doubles::kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
  }
  double x[Doubles::kWidth];
  lanes[0].store(x);
  for (int half = Doubles::kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  }
  return x[0];
}

// Of a row that has few: its tokens with weight, ascending. Null: all of the row's.
struct Support {
  const int32_t* tokens = nullptr;
  int64_t count = 0;
};

// The sum of elements `tokens` of the segment that starts at `begin`.
template <typename Elements, typename Tokens>
double sum_listed(const Elements& e, int64_t begin, const Tokens& tokens, int64_t count) {
  double x[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) x[(tokens(i) - begin) % kLanes] += e.at(tokens(i));
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  }
  return x[0];
}

template <typename Elements>
double sum_segment(const Elements& e, int64_t begin, int64_t V) {
  if (begin + kSegment > V || !e.plain(begin)) {
    return sum_listed(e, begin, [&](int64_t i) { return begin + i; }, std::min<int64_t>(kSegment, V - begin));
  }
  constexpr int kGroups = kLanes / Vec::kWidth;
  Doubles lanes[kLanes / Doubles::kWidth];
  for (int g = 0; g < kGroups; ++g) {
    const DoublePair first = e.pair(begin + g * Vec::kWidth);
    lanes[2 * g] = first.low, lanes[2 * g + 1] = first.high;
  }
  for (int64_t i = kLanes; i < kSegment; i += kLanes) {
    for (int g = 0; g < kGroups; ++g) {
      const DoublePair next = e.pair(begin + i + g * Vec::kWidth);
      lanes[2 * g] = lanes[2 * g] + next.low;
      lanes[2 * g + 1] = lanes[2 * g + 1] + next.high;
    }
  }
  return sum_of_lanes(lanes);
}

// Calls f(segment's first token, its tokens in the list, how many) for the segments below `end`, from token
// `at` of the list on; returns where the list goes on.
template <typename F>
int64_t each_segment(const Support& support, int64_t at, int64_t end, const F& f) {
  while (at < support.count && support.tokens[at] < end) {
    const int64_t begin = support.tokens[at] / kSegment * kSegment;
    int64_t next = at + 1;
    while (next < support.count && support.tokens[next] < begin + kSegment) ++next;
    f(begin, support.tokens + at, next - at);
    at = next;
  }
  return at;
}

template <typename Elements>
double sum_tokens(const Elements& e, int64_t begin, const int32_t* tokens, int64_t count) {
  // Zeros add nothing.
  if (count == 1) return e.at(tokens[0]);
  return sum_listed(e, begin, [&](int64_t i) { return static_cast<int64_t>(tokens[i]); }, count);
}

// The sums of the row's parts, and of them all.
template <typename Elements>
double sum_parts(const Elements& e, int64_t V, const Support& support, double* parts) {
  const int64_t count = parts_of(V);
  if (support.tokens != nullptr) {
    int64_t at = 0;
    for (int64_t part = 0; part < count; ++part) {
      double sum = 0.0;
      at = each_segment(
          support, at, (part + 1) * kPartElements,
          [&](int64_t begin, const int32_t* tokens, int64_t n) { sum += sum_tokens(e, begin, tokens, n); });
      parts[part] = sum;
    }
  } else {
    parallel_for(count, V * kElementWork, [&](int64_t part) {
      const int64_t begin = part * kPartElements, end = std::min(V, begin + kPartElements);
      double sum = 0.0;
      for (int64_t i = begin; i < end; i += kSegment) sum += sum_segment(e, i, V);
      parts[part] = sum;
    });
  }
  double sum = 0.0;
  for (int64_t part = 0; part < count; ++part) sum += parts[part];
  return sum;
}

// The token at which the cumulative sum passes `rest`.
template <typename Elements>
int64_t draw_from(const Elements& e, int64_t V, const Support& support, const double* parts, double rest) {
  const int part = descend([&](int i) { return parts[i]; }, parts_of(V), rest);
  int64_t begin = int64_t{kPartElements} * part;
  const int64_t left = std::min<int64_t>(V - begin, kPartElements);
  const int segments = static_cast<int>((left + kSegment - 1) / kSegment);
  double sums[kPart] = {};
  if (support.tokens != nullptr) {
    const int32_t* first = std::lower_bound(support.tokens, support.tokens + support.count,
                                            static_cast<int32_t>(begin), Ascending());
    each_segment(support, first - support.tokens, begin + left,
                 [&](int64_t segment, const int32_t* tokens, int64_t n) {
                   sums[(segment - begin) / kSegment] = sum_tokens(e, segment, tokens, n);
                 });
  } else {
    for (int s = 0; s < segments; ++s) sums[s] = sum_segment(e, begin + s * kSegment, V);
  }
  begin += kSegment * descend([&](int i) { return sums[i]; }, segments, rest);
  const int count = static_cast<int>(std::min<int64_t>(kSegment, V - begin));
  return begin + descend([&](int i) { return e.at(begin + i); }, count, rest);
}

}  // namespace specdec::cpu::SPECDEC_ISA
