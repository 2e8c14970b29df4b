// A node with many children. Making what is left of its row again after each rejection would take time
// quadratic in their number, so it is stored and brought up to date instead, and with it the row that
// siblings without replacement were drawn from. Arithmetic and order are those of LeftElements: so are the
// bits.
#pragma once

#include "target_row.h"

namespace specdec::cpu::SPECDEC_ISA {

// A node with more children than this is wide. Below it making the row again is cheaper than storing it.
constexpr int kMaxNarrow = 4;

// What is left of a row, as stored. Of a row with a list only listed tokens are; nothing is left where there
// was no weight.
template <typename T>
struct StoredLeft {
  TargetElements<T> weights;
  const double* left = nullptr;  // [V]

  double at(int64_t i) const { return weights.at(i) > 0.0 ? left[i] : 0.0; }
  SPECDEC_INLINE DoublePair pair(int64_t i) const {
    return {Doubles::load(left + i), Doubles::load(left + i + Doubles::kWidth)};
  }
  bool plain(int64_t) const { return true; }
};

// What one more rejection leaves, which summing it stores.
template <typename Before>
struct NewLeft {
  Before before;
  const float* q = nullptr;  // [V]
  double factor = 1.0, scale = 0.0;
  double* left = nullptr;  // [V]; may be where `before` reads

  double at(int64_t i) const {
    const double rest = factor * before.at(i) - scale * static_cast<double>(q[i]);
    return left[i] = rest > 0.0 ? rest : 0.0;
  }
  SPECDEC_INLINE DoublePair pair(int64_t i) const {
    const DoublePair x = before.pair(i), of_q = widen(Vec::load(q + i));
    const DoublePair rest{of(x.low, of_q.low), of(x.high, of_q.high)};
    rest.low.store(left + i);
    rest.high.store(left + i + Doubles::kWidth);
    return rest;
  }
  bool plain(int64_t segment) const { return before.plain(segment); }

 private:
  SPECDEC_INLINE Doubles of(Doubles x, Doubles of_q) const {
    return larger(Doubles::set(factor) * x - Doubles::set(scale) * of_q, Doubles::set(0.0));
  }
};

// Given probabilities without the tokens taken out, which summing them stores.
struct NewGiven {
  GivenElements given;
  float* copy = nullptr;  // [V]

  double at(int64_t i) const {
    const double q = given.at(i);
    copy[i] = static_cast<float>(q);
    return q;
  }
  SPECDEC_INLINE DoublePair pair(int64_t i) const {
    const Vec q = Vec::load(given.probs + i);
    q.store(copy + i);
    return widen(q);
  }
  bool plain(int64_t segment) const { return given.plain(segment); }
};

struct WideNode {
  double* left = nullptr;     // [V]; where the target's row has a list, only its tokens are written
  float* q = nullptr;         // [V] the siblings' row without elder siblings' tokens; null: with replacement
  double* q_parts = nullptr;  // [parts_of(V)]
  double left_total = 0.0, q_total = 0.0;
  int64_t removed = 0;  // elder siblings whose tokens are not in q; 0: q is not made yet

  // The sum of `row` without the tokens of elder siblings, of whom there are more from call to call, and at
  // least one.
  double remove(const float* row, int64_t V, const int64_t* elders, int64_t count) {
    if (removed == 0) {
      q_total = sum_parts(NewGiven{{row, elders, count}, q}, V, Support{}, q_parts);
      removed = count;
    }
    for (; removed < count; ++removed) {
      const int64_t token = elders[removed], part = token / kPartElements;
      q[token] = 0.0f;
      q_parts[part] = sum_part(GivenElements{q, nullptr, 0}, part, V);
      q_total = total_of(q_parts, V);
    }
    return q_total;
  }

  // What a rejection leaves of `before`.
  template <typename Before>
  void reject(const Before& before, const float* of_child, double factor, double scale, int64_t V,
              const Support& support, double* parts) {
    left_total = sum_parts(NewLeft<Before>{before, of_child, factor, scale, left}, V, support, parts);
  }
};

}  // namespace specdec::cpu::SPECDEC_ISA
