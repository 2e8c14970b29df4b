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
inline float logit_of(Key key) { return specdec::logit_of(key_rank(key)); }

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

// Finds the nucleus of all tokens of a row. A histogram of masses, over the scaled distance from the largest
// logit, finds the bucket where it ends, whose tokens alone are ordered. On the way the row's weights are
// stored.
template <typename T>
class NucleusSearch {
 public:
  // `weights` [V].
  NucleusSearch(const RowElements<T>& row, int64_t V, float* weights) : row_(row), V_(V), weights_(weights) {}

  // The last key of the nucleus; `keys` has room for V.
  Key last(float top_p, Key* keys) {
    const uint64_t total = store_weights();
    // Tokens of less than 0.78 (1 - top_p) / V of the mass have less in all than the nucleus leaves out.
    const double share = (1.0 - static_cast<double>(top_p)) / static_cast<double>(V_);
    const double depth = -std::log(0x1p-40 * static_cast<double>(total) * share) + 0.25;
    // At least 1, which a row of equal logits would fall short of.
    step_ = static_cast<float>((kBuckets - 1) / std::max(depth, 1.0));
    count_masses();
    uint64_t goal = mass_goal(total, top_p);
    int bucket = 0;
    for (; bucket < kBuckets - 1 && masses_[bucket] < goal; ++bucket) goal -= masses_[bucket];
    return nucleus_end(keys, collect(bucket, keys), goal, row_.scale);
  }

 private:
  static constexpr int kBuckets = 512;  // the last one has what lies too deep
  typedef int32_t Ints __attribute__((vector_size(Vec::kWidth * 4)));
  typedef uint64_t Longs __attribute__((vector_size(Doubles::kWidth * 8)));

  // Where a token lies, in buckets, by its scaled distance; what is greater never lies further.
  SPECDEC_INLINE Vec place(Vec scaled) const {
    return min(scaled * Vec::set(-step_), Vec::set(kBuckets - 1));
  }
  float place(float logit) const {
    const RowScale& scale = row_.scale;
    return std::min((logit - scale.largest) * scale.inverse_t * -step_, static_cast<float>(kBuckets - 1));
  }

  // mass_of.
  SPECDEC_INLINE static DoublePair masses_of(Vec weight) {
    const Vec units = weight * Vec::set(0x1p40f), limit = Vec::set(0x1p23f);
    const Ints whole = __builtin_convertvector(min(units, limit).x, Ints);
    // Beyond the limit there is nothing to truncate.
    return widen({units.x < limit.x ? __builtin_convertvector(whole, decltype(units.x)) : units.x});
  }

  // Integers below 2^52.
  SPECDEC_INLINE static void store_integers(Doubles x, uint64_t* out) {
    const Longs bits = (Longs)(x + Doubles::set(0x1p52)).x & 0xfffffffffffffu;
    std::memcpy(out, &bits, sizeof(bits));
  }

  // Stores the weights of all tokens and returns their mass.
  uint64_t store_weights() const {
    uint64_t total = 0;
    for (int64_t begin = 0; begin < V_; begin += kPartElements) {
      const int64_t end = std::min(V_, begin + kPartElements);
      // Exact: at most 2^13 integers of at most 2^40.
      Doubles low = Doubles::set(0.0), high = low;
      int64_t i = begin;
      for (; i + Vec::kWidth <= end; i += Vec::kWidth) {
        const Vec weight = row_.vec(i);
        weight.store(weights_ + i);
        const DoublePair masses = masses_of(weight);
        low = low + masses.low;
        high = high + masses.high;
      }
      double lanes[Doubles::kWidth], sum = 0.0;
      (low + high).store(lanes);
      for (const double x : lanes) sum += x;
      total += static_cast<uint64_t>(sum);
      for (; i < end; ++i) {
        weights_[i] = row_.single(i);
        total += mass_of(weights_[i]);
      }
    }
    return total;
  }

  // Fills the histogram. What lies too deep goes to places beyond it, one a lane, so that no addition waits
  // for another.
  void count_masses() {
    Ints beyond;
    for (int lane = 0; lane < Vec::kWidth; ++lane) beyond[lane] = kBuckets + lane;
    const Vec deepest = Vec::set(kBuckets - 1);
    int32_t buckets[kSegment];
    uint64_t masses[kSegment];
    int64_t i = 0;
    while (i + Vec::kWidth <= V_) {
      int count = 0;
      for (; count < kSegment && i + Vec::kWidth <= V_; i += Vec::kWidth) {
        const Vec at = place(row_.scaled(Vec::load(row_.logits + i)));
        if (greater_bits(deepest, at) == 0) continue;
        const Ints bucket = at.x < deepest.x ? __builtin_convertvector(at.x, Ints) : beyond;
        const DoublePair pair = masses_of(Vec::load(weights_ + i));
        std::memcpy(buckets + count, &bucket, sizeof(bucket));
        store_integers(pair.low, masses + count);
        store_integers(pair.high, masses + count + Doubles::kWidth);
        count += Vec::kWidth;
      }
      for (int n = 0; n < count; ++n) masses_[buckets[n]] += masses[n];
    }
    for (; i < V_; ++i) {
      masses_[static_cast<int>(place(to_float(row_.logits[i])))] += mass_of(weights_[i]);
    }
  }

  // The keys of a bucket.
  int64_t collect(int bucket, Key* keys) const {
    const Vec first = Vec::set(static_cast<float>(bucket));
    const Vec next = Vec::set(bucket < kBuckets - 1 ? static_cast<float>(bucket + 1) : INFINITY);
    int64_t count = 0, i = 0;
    for (; i + Vec::kWidth <= V_; i += Vec::kWidth) {
      const Vec at = place(row_.scaled(Vec::load(row_.logits + i)));
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
  float* weights_;
  float step_ = 0.0f;  // buckets per unit of scaled distance
  uint64_t masses_[kBuckets + Vec::kWidth] = {};
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
