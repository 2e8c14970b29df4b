// Which tokens of a row are kept: the largest, the top k, the nucleus. Orders a few candidates, never the
// row.
#pragma once

#include <algorithm>
#include <cmath>

#include "parallel.h"
#include "sampling_row.h"

namespace specdec::cpu::SPECDEC_ISA {

struct Settings {
  float temperature, top_p, min_p;
  int64_t top_k;  // 0: all; no more than V

  Settings(const SamplingView& view, int64_t row, int64_t V)
      : temperature(view.temperature[row]), top_p(view.top_p[row]), min_p(view.min_p[row]), top_k(0) {
    const bool greedy = !(temperature > 0.0f);
    if (greedy || view.top_k[row] > 0) top_k = greedy ? 1 : std::min<int64_t>(view.top_k[row], V);
    if (top_k == V && V > 1) top_k = 0;
  }
};

// A token and its logit as one integer: greater for a greater logit, of equal logits for the smaller token.
using Key = uint64_t;
inline Key key_of(float logit, int64_t token) {
  return static_cast<Key>(rank_of(logit)) << 32 | (0xffffffffu - static_cast<uint32_t>(token));
}
inline int64_t token_of(Key key) { return 0xffffffffu - static_cast<uint32_t>(key); }
inline uint32_t key_rank(Key key) { return static_cast<uint32_t>(key >> 32); }
inline float logit_of(Key key) {
  const uint32_t rank = key_rank(key), bits = rank >> 31 ? rank & 0x7fffffffu : ~rank;
  float logit;
  std::memcpy(&logit, &bits, sizeof(logit));
  return logit;
}

constexpr int64_t kPartElements = int64_t{kSegment} * kPart;

// The largest of logits [begin, end), NaN if one of them is.
template <typename T>
float largest_of(const T* logits, int64_t begin, int64_t end) {
  Vec best[4];
  for (Vec& b : best) b = Vec::set(-INFINITY);
  uint32_t nan = 0;
  int64_t i = begin;
  for (; i + 4 * Vec::kWidth <= end; i += 4 * Vec::kWidth) {
    Vec x[4];
    for (int j = 0; j < 4; ++j) x[j] = Vec::load(logits + i + j * Vec::kWidth);
    nan |= nan_bits(x[0], x[1]) | nan_bits(x[2], x[3]);
    for (int j = 0; j < 4; ++j) best[j] = max(best[j], x[j]);
  }
  float lanes[Vec::kWidth];
  max(max(best[0], best[1]), max(best[2], best[3])).store(lanes);
  float largest = -INFINITY;
  for (const float x : lanes) largest = std::max(largest, x);
  for (; i < end; ++i) {
    const float x = to_float(logits[i]);
    nan |= x != x;
    largest = std::max(largest, x);
  }
  return nan != 0 ? NAN : largest;
}

// The largest logit of the row; of its parts in `parts`. False where it is not finite or there is a NaN.
template <typename T>
bool find_largest(const T* logits, int64_t V, double* parts, float& largest) {
  const int64_t count = parts_of(V);
  parallel_for(count, V, [&](int64_t part) {
    const int64_t begin = part * kPartElements;
    parts[part] = static_cast<double>(largest_of(logits, begin, std::min(V, begin + kPartElements)));
  });
  double most = -INFINITY;
  bool nan = false;
  for (int64_t part = 0; part < count; ++part) {
    nan = nan || parts[part] != parts[part];
    most = std::max(most, parts[part]);
  }
  largest = static_cast<float>(most);
  return !nan && std::isfinite(largest);
}

// The first token of the largest logit, after find_largest.
template <typename T>
int64_t first_largest(const T* logits, int64_t V, const double* parts, float largest) {
  int64_t part = 0;
  while (parts[part] != static_cast<double>(largest)) ++part;
  const Vec wanted = Vec::set(largest);
  int64_t i = part * kPartElements;
  // Nothing is greater, so what is not less is equal.
  constexpr uint32_t kAll = (uint64_t{1} << Vec::kWidth) - 1;
  while (i + Vec::kWidth <= V && greater_bits(wanted, Vec::load(logits + i)) == kAll) i += Vec::kWidth;
  while (to_float(logits[i]) != largest) ++i;
  return i;
}

// Room for the keys that `largest_keys` collects.
inline int64_t keys_wanted(int64_t k) { return k + std::max<int64_t>(k, 256) + Vec::kWidth; }

// The keys of the k largest finite logits, in no order; returns how many there are. What cannot be among them
// any more is passed over a vector at a time.
template <typename T>
int64_t largest_keys(const T* logits, int64_t V, int64_t k, Key* keys) {
  const int64_t room = keys_wanted(k) - Vec::kWidth;
  int64_t count = 0;
  float cut = -INFINITY;  // k tokens before have at least this
  const auto shrink = [&] {
    if (count <= k) return;
    std::nth_element(keys, keys + k - 1, keys + count, Descending());
    count = k;
    cut = logit_of(keys[k - 1]);
  };
  int64_t i = 0;
  for (; i + Vec::kWidth <= V; i += Vec::kWidth) {
    uint32_t above = greater_bits(Vec::load(logits + i), Vec::set(cut));
    for (; above != 0; above &= above - 1) {
      const int64_t token = i + __builtin_ctz(above);
      keys[count++] = key_of(to_float(logits[token]), token);
    }
    if (count >= room) shrink();
  }
  for (; i < V; ++i) {
    const float logit = to_float(logits[i]);
    if (logit > cut) keys[count++] = key_of(logit, i);
  }
  shrink();
  return count;
}

inline uint64_t mass_of_key(Key key, const RowScale& scale) {
  return mass_of(specdec::weight_of((logit_of(key) - scale.largest) * scale.inverse_t));
}

// The key at which the mass of the greatest keys first reaches `goal`.
inline Key nucleus_end(Key* keys, int64_t count, uint64_t goal, const RowScale& scale) {
  while (count > 32) {
    const int64_t half = count / 2;
    std::nth_element(keys, keys + half, keys + count, Descending());
    uint64_t mass = 0;
    for (int64_t i = 0; i < half; ++i) mass += mass_of_key(keys[i], scale);
    if (mass >= goal) {
      count = half;
    } else {
      goal -= mass;
      keys += half;
      count -= half;
    }
  }
  std::sort(keys, keys + count, Descending());
  uint64_t mass = 0;
  int64_t i = 0;
  for (; i + 1 < count; ++i) {
    mass += mass_of_key(keys[i], scale);
    if (mass >= goal) break;
  }
  return keys[i];
}

constexpr int kBuckets = 2048;  // of a histogram over the nucleus, by the scaled distance from the largest

// Finds the nucleus of all tokens of a row. A histogram of masses finds the bucket where it ends, whose
// tokens alone are ordered.
template <typename T>
class NucleusSearch {
 public:
  NucleusSearch(const RowElements<T>& row, int64_t V, float top_p) : row_(row), V_(V), top_p_(top_p) {
    // What lies this far below the largest has less mass in all than the nucleus leaves out.
    const double depth = std::log(static_cast<double>(V) / (1.0 - static_cast<double>(top_p))) + 0.25;
    const double largest = static_cast<double>(row.scale.largest);
    const double floor =
        largest - depth * 1.001 / static_cast<double>(row.scale.inverse_t) - 1e-6 * std::fabs(largest);
    floor_ = std::min(static_cast<float>(floor), std::nextafter(row.scale.largest, -INFINITY));
    step_ = static_cast<float>((kBuckets - 1) / depth);
  }

  // The last key of the nucleus; `keys` has room for V.
  Key last(Key* keys) {
    uint64_t goal = mass_goal(count_masses(), top_p_);
    int bucket = 0;
    for (; bucket < kBuckets - 1 && masses_[bucket] < goal; ++bucket) goal -= masses_[bucket];
    return nucleus_end(keys, collect(bucket, keys), goal, row_.scale);
  }

 private:
  typedef int32_t Ints __attribute__((vector_size(Vec::kWidth * 4)));

  // Where a logit lies, in buckets; what is greater never lies further.
  SPECDEC_INLINE Vec place(Vec logit) const {
    const RowScale& scale = row_.scale;
    const Vec scaled = (Vec::set(scale.largest) - logit) * Vec::set(scale.inverse_t) * Vec::set(step_);
    return min(scaled, Vec::set(kBuckets - 1));
  }
  float place(float logit) const {
    const RowScale& scale = row_.scale;
    return std::min((scale.largest - logit) * scale.inverse_t * step_, static_cast<float>(kBuckets - 1));
  }

  // Fills the histogram and returns the mass of the row.
  uint64_t count_masses() {
    uint64_t total = 0;
    for (int64_t begin = 0; begin < V_; begin += kPartElements) {
      const int64_t end = std::min(V_, begin + kPartElements);
      // Exact: at most 2^13 integers of at most 2^40.
      Doubles low = Doubles::set(0.0), high = low;
      int64_t i = begin;
      for (; i + Vec::kWidth <= end; i += Vec::kWidth) {
        const Vec logit = Vec::load(row_.logits + i);
        const Vec units = row_.vec(i) * Vec::set(0x1p40f);
        const Vec small = min(units, Vec::set(0x1p23f));  // beyond it there is nothing to truncate
        const Ints whole = __builtin_convertvector(small.x, Ints);
        Vec truncated;
        truncated.x = __builtin_convertvector(whole, decltype(truncated.x));
        const DoublePair pair = widen({units.x < Vec::set(0x1p23f).x ? truncated.x : units.x});
        low = low + pair.low;
        high = high + pair.high;
        uint32_t above = greater_bits(logit, Vec::set(floor_));
        if (above == 0) continue;
        float masses[Vec::kWidth], places[Vec::kWidth];
        units.store(masses);
        place(logit).store(places);
        for (; above != 0; above &= above - 1) {
          const int lane = __builtin_ctz(above);
          masses_[static_cast<int>(places[lane])] +=
              static_cast<uint64_t>(static_cast<int64_t>(masses[lane]));
        }
      }
      double lanes[Doubles::kWidth], sum = 0.0;
      (low + high).store(lanes);
      for (const double x : lanes) sum += x;
      total += static_cast<uint64_t>(sum);
      for (; i < end; ++i) {
        const uint64_t mass = mass_of(row_.single(i));
        total += mass;
        masses_[static_cast<int>(place(to_float(row_.logits[i])))] += mass;
      }
    }
    return total;
  }

  // The keys of a bucket.
  int64_t collect(int bucket, Key* keys) const {
    const Vec first = Vec::set(static_cast<float>(bucket));
    const Vec next = Vec::set(bucket < kBuckets - 1 ? static_cast<float>(bucket + 1) : INFINITY);
    int64_t count = 0, i = 0;
    for (; i + Vec::kWidth <= V_; i += Vec::kWidth) {
      const Vec at = place(Vec::load(row_.logits + i));
      uint32_t inside = greater_bits(next, at) & ~greater_bits(first, at);
      for (; inside != 0; inside &= inside - 1) {
        const int64_t token = i + __builtin_ctz(inside);
        keys[count++] = key_of(to_float(row_.logits[token]), token);
      }
    }
    for (; i < V_; ++i) {
      const float logit = to_float(row_.logits[i]);
      if (static_cast<int>(place(logit)) == bucket) keys[count++] = key_of(logit, i);
    }
    return count;
  }

  const RowElements<T>& row_;
  int64_t V_;
  float top_p_, floor_, step_;
  uint64_t masses_[kBuckets] = {};
};

// Keys that a row's settings want room for.
inline int64_t keys_wanted(const Settings& s, int64_t V) {
  if (s.top_k > 1) return keys_wanted(s.top_k);
  return s.top_k == 0 && s.top_p < 1.0f ? V : 0;
}

// Rows of no more tokens are summed and drawn from by their tokens.
constexpr int64_t kMaxListed = 512;
inline int64_t listed_wanted(const Settings& s) { return s.top_k <= kMaxListed ? s.top_k : 0; }

}  // namespace specdec::cpu::SPECDEC_ISA
