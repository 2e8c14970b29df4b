// likeliest: the top of a row by the maxima of its segments. One pass finds those, a second the sum of the
// weights; then each token costs a look at the maxima and at one segment.
#include <cmath>
#include <limits>

#include "ops.h"
#include "parallel.h"
#include "rows.h"
#include "scratch.h"
#include "simd_math.h"

namespace specdec::cpu::SPECDEC_ISA {

namespace {

constexpr int64_t kSegment = 64;  // numbers
constexpr float kNone = -std::numeric_limits<float>::infinity();

float largest(const float* x, int64_t count) {
  Vec most = Vec::set(kNone);
  int64_t i = 0;
  for (; i + Vec::kWidth <= count; i += Vec::kWidth) most = max(Vec::load(x + i), most);
  float lanes[Vec::kWidth];
  most.store(lanes);
  float found = kNone;
  for (float lane : lanes) found = lane > found ? lane : found;
  for (; i < count; ++i) found = x[i] > found ? x[i] : found;
  return found;
}

// Sum of exp(scale * (x - top)).
float weights(const float* x, int64_t V, float scale, float top) {
  constexpr int kSums = 4;  // independent, to hide the latency of the additions
  Vec sums[kSums] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
  const Vec factor = Vec::set(scale), highest = Vec::set(top);
  int64_t i = 0;
  for (; i + Vec::kWidth <= V; i += Vec::kWidth) {
    Vec& sum = sums[i / Vec::kWidth % kSums];
    sum = sum + exp((Vec::load(x + i) - highest) * factor);
  }
  float total = hsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < V; ++i) total += exp((x[i] - top) * scale);
  return total;
}

struct Row {
  const float* x;
  int64_t V;
  float* maxima;  // of each segment, over what was not taken
  const int64_t* taken;
  int64_t count;

  int64_t size(int64_t segment) const { return std::min(kSegment, V - segment * kSegment); }

  bool is_taken(int64_t token) const {
    for (int64_t i = 0; i < count; ++i) {
      if (taken[i] == token) return true;
    }
    return false;
  }

  // The first token of the segment that has its maximum.
  int64_t first(int64_t segment) const {
    int64_t token = segment * kSegment;
    while (!(x[token] == maxima[segment]) || is_taken(token)) ++token;
    return token;
  }

  void update(int64_t segment) {
    float most = kNone;
    for (int64_t i = 0; i < size(segment); ++i) {
      const int64_t token = segment * kSegment + i;
      if (x[token] > most && !is_taken(token)) most = x[token];
    }
    maxima[segment] = most;
  }
};

void likeliest_row(const float* x, int64_t V, int64_t K, float scale, float* maxima, int64_t* tokens,
                   float* probs) {
  for (int64_t i = 0; i < K; ++i) tokens[i] = -1, probs[i] = 0.0f;
  const int64_t segments = (V + kSegment - 1) / kSegment;
  Row row{x, V, maxima, tokens, 0};
  for (int64_t s = 0; s < segments; ++s) maxima[s] = largest(x + s * kSegment, row.size(s));
  const float top = largest(maxima, segments);
  if (!(top > kNone)) return;
  const float total = weights(x, V, scale, top);
  if (!(total > 0.0f && std::isfinite(total))) return;  // a NaN or an infinity
  while (row.count < K) {
    int64_t best = 0;
    for (int64_t s = 1; s < segments; ++s) best = maxima[s] > maxima[best] ? s : best;
    if (!(maxima[best] > kNone)) return;
    const int64_t token = row.first(best);
    tokens[row.count] = token;
    probs[row.count] = exp((x[token] - top) * scale) / total;
    if (++row.count < K) row.update(best);
  }
}

}  // namespace

Status likeliest(const LikeliestParams& p) {
  parallel_for(p.R, p.R * p.V * 2, [&](int64_t r) {
    float* maxima = thread_scratch((p.V + kSegment - 1) / kSegment);
    likeliest_row(p.logits + r * p.V, p.V, p.K, p.scale == nullptr ? 1.0f : p.scale[r], maxima,
                  p.tokens + r * p.K, p.probs + r * p.K);
  });
  return Status::kOk;
}

}  // namespace specdec::cpu::SPECDEC_ISA
