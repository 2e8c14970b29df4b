// The arithmetic of sampling_math.h written out: sums, draws, and rows made whole and sorted.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "buffer.h"
#include "specdec/sampling_math.h"

namespace specdec::test {
namespace {

double tree_sum(const std::vector<double>& row, std::vector<double>* of_parts = nullptr,
                std::vector<double>* of_segments = nullptr) {
  const int64_t V = static_cast<int64_t>(row.size());
  double total = 0.0, part = 0.0;
  for (int64_t segment = 0; segment * kSegment < V; ++segment) {
    double lanes[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = 0.0;
      for (int64_t i = segment * kSegment + lane; i < (segment + 1) * kSegment; i += kLanes) {
        lanes[lane] += i < V ? row[i] : 0.0;
      }
    }
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    if (of_segments != nullptr) of_segments->push_back(lanes[0]);
    part += lanes[0];
    if ((segment + 1) % kPart == 0 || (segment + 1) * kSegment >= V) {
      if (of_parts != nullptr) of_parts->push_back(part);
      total += part;
      part = 0.0;
    }
  }
  return total;
}

int64_t invert(const std::vector<double>& row, double rest) {
  std::vector<double> parts, segments;
  tree_sum(row, &parts, &segments);
  const auto find = [&](const std::vector<double>& entries, int64_t begin, int64_t most) {
    const int64_t count = std::min<int64_t>(most, static_cast<int64_t>(entries.size()) - begin);
    return begin + descend([&](int i) { return entries[begin + i]; }, static_cast<int>(count), rest);
  };
  const int64_t part = find(parts, 0, static_cast<int64_t>(parts.size()));
  const int64_t segment = find(segments, part * kPart, kPart);
  return find(row, segment * kSegment, kSegment);
}

struct Settings {
  float temperature = 1.0f;
  int32_t top_k = 0;
  float top_p = 1.0f, min_p = 0.0f;
};

struct Row {
  bool good = false;
  std::vector<float> weights, probs;

  Row() = default;
  Row(const std::vector<float>& logits, Settings s) {
    const int64_t V = static_cast<int64_t>(logits.size());
    float largest = -INFINITY;
    bool nan = false;
    for (const float x : logits) {
      nan = nan || std::isnan(x);
      largest = std::max(largest, x);
    }
    good = !nan && std::isfinite(largest);
    probs.assign(V, kNaN);
    if (!good) return;
    if (s.temperature == 0.0f) s = {1.0f, 1};
    std::vector<int64_t> order(V);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return logits[i] > logits[j]; });
    if (s.top_k > 0 && s.top_k < V) order.resize(s.top_k);
    const auto weight = [&](int64_t i) {
      return weight_of((logits[i] - largest) * inverse_of(s.temperature));
    };
    if (s.top_p < 1.0f) {
      uint64_t total = 0, reached = 0;
      for (const int64_t i : order) total += mass_of(weight(i));
      const uint64_t goal = mass_goal(total, s.top_p);
      size_t kept = 0;
      while (reached < goal) reached += mass_of(weight(order[kept++]));
      order.resize(kept);
    }
    weights.assign(V, 0.0f);
    for (const int64_t i : order) {
      if (weight(i) >= s.min_p) weights[i] = weight(i);
    }
    const float inverse = static_cast<float>(1.0 / tree_sum({weights.begin(), weights.end()}));
    for (int64_t i = 0; i < V; ++i) probs[i] = weights[i] * inverse;
  }
};

}  // namespace
}  // namespace specdec::test
