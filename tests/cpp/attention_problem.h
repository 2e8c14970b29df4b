// Random trees below random caches, poisoned wherever a kernel must not look, and attention in float64, a
// node's keys gathered along its path: what every kernel must agree with.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "buffer.h"
#include "specdec/attention_params.h"

namespace specdec::attention_test {

struct Case {
  int64_t B = 2, N = 5, HQ = 4, HK = 2, D = 32, prefix = 0;
  int64_t committed = 20;  // of the fullest slot
  bool tree = true;
  DType dtype = DType::kFloat32;
  int64_t gap = 3;  // elements after every row, which nobody may read
};

class Problem {
 public:
  Problem(const Case& c, unsigned seed) : c(c), rng(seed), slots_total(c.B + 2) {
    q = rows(c.B * c.N * c.HQ);
    k = rows(c.B * c.N * c.HK);
    v = rows(c.B * c.N * c.HK);
    prefix_k = rows(c.B * c.prefix * c.HK);
    prefix_v = rows(c.B * c.prefix * c.HK);
    room = c.committed + 3;
    k_cache = test::Buffer(c.dtype, slots_total * c.HK * room * stride());
    v_cache = k_cache;
    cache_lengths.assign(slots_total, 1 << 30);
    std::vector<int32_t> order(slots_total);
    for (int64_t s = 0; s < slots_total; ++s) order[s] = static_cast<int32_t>(s);
    std::shuffle(order.begin(), order.end(), rng);
    for (int64_t b = 0; b < c.B; ++b) {
      slots.push_back(order[b]);
      const int64_t tokens = b == 0 ? c.committed : std::max<int64_t>(c.committed - 7 * b, 0);
      cache_lengths[order[b]] = static_cast<int32_t>(tokens);
      for (int64_t h = 0; h < c.HK; ++h) {
        for (int64_t t = 0; t < tokens; ++t) {
          fill_row(&k_cache, cache_at(order[b], h, t));
          fill_row(&v_cache, cache_at(order[b], h, t));
        }
      }
      lengths.push_back(static_cast<int32_t>(c.N));
      for (int64_t i = 0; i < c.prefix; ++i) prefix_parents.push_back(pick_parent(i));
      for (int64_t i = 0; i < c.N; ++i) parents.push_back(pick_parent(c.prefix + i));
    }
  }

  TreeAttentionParams params() {
    TreeAttentionParams p;
    p.B = c.B, p.N = c.N, p.HQ = c.HQ, p.HK = c.HK, p.D = c.D;
    p.dtype = c.dtype;
    p.q = q.data();
    p.q_stride = strides(c.N, c.HQ);
    p.scale = scale();
    p.nodes = {k.data(), v.data(), strides(c.N, c.HK), strides(c.N, c.HK), c.N};
    const Strides of_cache{c.HK * room * stride(), stride(), room * stride()};
    p.cache = {k_cache.data(), v_cache.data(), of_cache, of_cache, cache_lengths.data(), slots_total, room};
    p.slots = slots.data();
    p.parents = c.tree ? parents.data() : nullptr;
    p.lengths = lengths.data();
    p.prefix = {prefix_k.data(), prefix_v.data(), strides(c.prefix, c.HK), strides(c.prefix, c.HK), c.prefix};
    p.prefix_parents = c.tree ? prefix_parents.data() : nullptr;
    out = test::Buffer(c.dtype, c.B * c.N * c.HQ * c.D);
    p.out = out.data();
    return p;
  }

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(c.D)); }
  int64_t stride() const { return c.D + c.gap; }
  Strides strides(int64_t nodes, int64_t heads) const {
    return {nodes * heads * stride(), heads * stride(), stride()};
  }
  int64_t cache_at(int64_t slot, int64_t h, int64_t t) const {
    return ((slot * c.HK + h) * room + t) * stride();
  }
  int64_t out_at(int64_t b, int64_t n, int64_t h) const { return ((b * c.N + n) * c.HQ + h) * c.D; }

  // Ids over prefix then new nodes, from a root to new node n.
  std::vector<int64_t> path_to(int64_t b, int64_t n) const {
    std::vector<int64_t> path;
    for (int64_t id = c.prefix + n; id >= 0;) {
      path.insert(path.begin(), id);
      id = !c.tree         ? id - 1
           : id < c.prefix ? prefix_parents[b * c.prefix + id]
                           : parents[b * c.N + id - c.prefix];
    }
    return path;
  }

  // A key or value of the path of a node: where it lies and in which buffer.
  struct Entry {
    const test::Buffer *k, *v;
    int64_t at;
  };
  Entry entry(int64_t b, int64_t id, int64_t hk) const {
    if (id < c.prefix) return {&prefix_k, &prefix_v, ((b * c.prefix + id) * c.HK + hk) * stride()};
    return {&k, &v, ((b * c.N + id - c.prefix) * c.HK + hk) * stride()};
  }
  std::vector<Entry> keys(int64_t b, int64_t n, int64_t hk) const {
    std::vector<Entry> all;
    for (int64_t t = 0; t < cache_lengths[slots[b]]; ++t) {
      all.push_back({&k_cache, &v_cache, cache_at(slots[b], hk, t)});
    }
    for (const int64_t id : path_to(b, n)) all.push_back(entry(b, id, hk));
    return all;
  }

  // A head of a node against the formula. A score, a sum of D products in lanes, of which the narrowest
  // vector has four, errs by (D / 4 + 6) roundings of |q| |k| scale; a weight by as much and two more of its
  // own; the two sums of T numbers, one after the other, by T of them; and the quotient of the sums by both
  // errors, of values no larger than the largest. Then one rounding to the output's type.
  void expect_reference(int64_t b, int64_t n, int64_t h) const {
    const std::vector<Entry> all = keys(b, n, h / (c.HQ / c.HK));
    const int64_t from = ((b * c.N + n) * c.HQ + h) * stride();
    std::vector<double> scores;
    double q_norm = 0.0, k_norm = 0.0, v_largest = 0.0;
    for (int64_t d = 0; d < c.D; ++d) q_norm += q[from + d] * q[from + d];
    for (const Entry& e : all) {
      double sum = 0.0, norm = 0.0;
      for (int64_t d = 0; d < c.D; ++d) {
        sum += q[from + d] * (*e.k)[e.at + d];
        norm += (*e.k)[e.at + d] * (*e.k)[e.at + d];
        v_largest = std::max(v_largest, std::abs((*e.v)[e.at + d]));
      }
      k_norm = std::max(k_norm, norm);
      scores.push_back(sum * scale());
    }
    const double most = *std::max_element(scores.begin(), scores.end());
    double weights = 0.0;
    for (double& s : scores) weights += s = std::exp(s - most);
    const double half = 0.5 * std::numeric_limits<float>::epsilon();
    const double score_error = std::sqrt(q_norm * k_norm) * scale() * (static_cast<double>(c.D) / 4 + 6);
    const double bound = 2 * half * v_largest * (score_error + 2 + static_cast<double>(all.size()));
    const int digits = c.dtype == DType::kFloat32 ? 25 : c.dtype == DType::kBFloat16 ? 8 : 11;
    for (int64_t d = 0; d < c.D; ++d) {
      double want = 0.0;
      for (size_t t = 0; t < all.size(); ++t) want += scores[t] / weights * (*all[t].v)[all[t].at + d];
      const double last = std::ldexp(std::abs(want) + bound, -digits) + std::ldexp(1.0, -25);
      const double got = out[out_at(b, n, h) + d];
      ASSERT_LE(std::abs(got - want), bound + last) << "row " << b << " node " << n << " head " << h << " at "
                                                    << d << " got " << got << " want " << want;
    }
  }

  // All of a call: the formula for the first head and the last, and zeros where there is nothing.
  void expect_reference() const {
    for (int64_t b = 0; b < c.B; ++b) {
      const int64_t length = slots[b] < 0 ? 0 : std::min<int64_t>(std::max(lengths[b], 0), c.N);
      for (int64_t n = 0; n < c.N; ++n) {
        for (int64_t h = 0; h < c.HQ; ++h) {
          if (n < length) {
            if (h == 0 || h == c.HQ - 1) expect_reference(b, n, h);
            continue;
          }
          for (int64_t d = 0; d < c.D; ++d) ASSERT_EQ(out[out_at(b, n, h) + d], 0.0) << b << " " << n;
        }
      }
    }
  }

  // A number that every type holds.
  float value() {
    const float x = std::normal_distribution<float>()(rng);
    return std::ldexp(std::round(std::ldexp(x, 5)), -5);
  }
  void fill_row(test::Buffer* buffer, int64_t at) {
    for (int64_t d = 0; d < c.D; ++d) buffer->set(at + d, value());
  }
  test::Buffer rows(int64_t count) {
    test::Buffer buffer(c.dtype, count * stride());
    for (int64_t r = 0; r < count; ++r) fill_row(&buffer, r * stride());
    return buffer;
  }
  int32_t pick_parent(int64_t id) {
    if (!c.tree) return static_cast<int32_t>(id - 1);
    if (rng() % 2 == 0) return static_cast<int32_t>(id - 1);  // deep trees too
    return std::uniform_int_distribution<int32_t>(-1, static_cast<int32_t>(id) - 1)(rng);
  }

  Case c;
  std::mt19937 rng;
  int64_t slots_total, room;
  test::Buffer q, k, v, prefix_k, prefix_v, k_cache, v_cache, out;
  std::vector<int32_t> slots, lengths, parents, prefix_parents, cache_lengths;
};

}  // namespace specdec::attention_test
