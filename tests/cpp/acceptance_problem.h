// A round of acceptance and what it has to decide, with what is left of a row stored. Included by the tests
// of a backend, which define TestBackend before (see `Region`).
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "acceptance_reference.h"
#include "specdec/acceptance_rules.h"

namespace specdec::test {

// Memory of a call, for backends that want to know it. `values`: the runs of bytes that hold values before
// the call, offset and size; none: all of them.
struct Region {
  const char* name;
  const void* data;
  size_t bytes;
  bool output;
  std::vector<std::pair<size_t, size_t>> values;
};
using Regions = std::vector<Region>;

template <typename T>
void add_region(Regions& regions, const char* name, const std::vector<T>& x, bool output = false) {
  if (!x.empty()) regions.push_back({name, x.data(), x.size() * sizeof(T), output, {}});
}

namespace {

class Round {
 public:
  int64_t B, N, V, P, R, gap;
  bool tree;
  std::mt19937 rng;
  std::vector<int64_t> tokens, positions, next_token;
  std::vector<int32_t> parents, lengths, draft_rows, rules, top_k, path, path_lengths;
  std::vector<uint64_t> seeds;
  std::vector<float> temperature, top_p, min_p, draft_probs;  // draft_probs [R, V + gap]
  Buffer logits;                                              // [B, N, V + gap]

  Round(int64_t B, int64_t N, int64_t V, bool tree, DType dtype, unsigned seed)
      : B(B),
        N(N),
        V(V),
        P(N + 3),
        R(B * N),
        gap(seed % 3 == 0 ? 0 : 8),
        tree(tree),
        rng(seed),
        logits(dtype, B * N * (V + gap)) {
    for (int64_t b = 0; b < B; ++b) {
      lengths.push_back(static_cast<int32_t>(b % 5 == 3 ? 0 : b % 5 == 4 ? 1 : N - below(N / 2 + 1)));
      positions.push_back(below(int64_t{1} << 40));
      seeds.push_back(static_cast<uint64_t>(rng()) << 32 | rng());
      rules.push_back(static_cast<int32_t>(b % 6));
      static const Settings kSettings[] = {
          {1.0f, 0, 1.0f, 0.0f}, {0.8f, 50, 0.95f, 0.0f}, {0.0f, 0, 1.0f, 0.0f}, {1.5f, 0, 0.9f, 0.0f},
          {0.7f, 3, 1.0f, 0.0f}, {1.0f, 0, 1.0f, 0.05f},  {2.0f, 0, 0.5f, 0.01f}};
      set(b, kSettings[below(7)]);
      for (int64_t n = 0; n < N; ++n) {
        const bool valid = n < lengths[b];
        tokens.push_back(valid ? below(V) : int64_t{1} << 60);
        parents.push_back(valid ? static_cast<int32_t>(n == 0 ? -1 : tree ? below(n) : n - 1) : 1 << 30);
        draft_rows.push_back(valid && n > 0 ? static_cast<int32_t>(b * N + parents.back()) : 1 << 30);
      }
    }
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t n = 0; n < N; ++n) fill(b, n);
    }
    draft();
  }

  int64_t below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(rng); }
  float normal() { return std::normal_distribution<float>()(rng); }

  void set(int64_t b, const Settings& s) {
    temperature.resize(std::max<size_t>(temperature.size(), b + 1), 1.0f);
    top_k.resize(temperature.size()), top_p.resize(temperature.size(), 1.0f),
        min_p.resize(temperature.size());
    temperature[b] = s.temperature, top_k[b] = s.top_k, top_p[b] = s.top_p, min_p[b] = s.min_p;
  }

  Settings settings(int64_t b) const { return {temperature[b], top_k[b], top_p[b], min_p[b]}; }
  int32_t parent(int64_t b, int64_t n) const { return parents[b * N + n]; }
  int64_t at(int64_t b, int64_t n, int64_t i) const { return (b * N + n) * (V + gap) + i; }

  // A few values occur often, some tokens are impossible; padding is NaN.
  void fill(int64_t b, int64_t n) {
    const bool coarse = below(3) == 0;
    for (int64_t i = 0; i < V + gap; ++i) {
      float x = coarse ? static_cast<float>(below(9)) - 4.0f : 3.0f * normal();
      if (i > 0 && below(50) == 0) x = -INFINITY;
      logits.set(at(b, n, i), n < lengths[b] && i < V ? x : kNaN);
    }
  }

  std::vector<float> row(int64_t b, int64_t n) const {
    std::vector<float> out(V);
    for (int64_t i = 0; i < V; ++i) out[i] = static_cast<float>(logits[at(b, n, i)]);
    return out;
  }

  // Rows near the target's, so that paths get long, and tokens drawn from them; rows that nothing was drawn
  // from are NaN.
  void draft() {
    draft_probs.assign(R * (V + gap), kNaN);
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t n = 0; n < lengths[b]; ++n) {
        std::vector<float> near = row(b, n);
        const float noise = below(4) == 0 ? 2.0f : 0.3f;
        for (float& x : near) x += noise * normal();
        const Row q(near, settings(b));
        std::copy(q.probs.begin(), q.probs.end(), draft_probs.begin() + (b * N + n) * (V + gap));
      }
      for (int64_t n = 1; n < lengths[b]; ++n) {
        std::vector<double> q(V);
        for (int64_t i = 0; i < V; ++i) q[i] = draft_probs[draft_rows[b * N + n] * (V + gap) + i];
        const bool apart = rules[b] == 2 || rules[b] == 5;
        for (int64_t m = 1; m < n; ++m) {
          if (apart && parent(b, m) == parent(b, n)) q[tokens[b * N + m]] = 0.0;
        }
        const double total = tree_sum(q);
        // A drafter that ran out of tokens: any.
        tokens[b * N + n] =
            total > 0.0 ? invert(q, std::generate_canonical<double, 53>(rng) * total) : below(V);
      }
    }
  }

  DraftView draft_view() const { return {tokens.data(), tree ? parents.data() : nullptr, lengths.data()}; }

  AcceptedView poisoned() {
    path.assign(B * P, -7), path_lengths.assign(B, -7), next_token.assign(B, -7);
    return {path.data(), path_lengths.data(), next_token.data(), P};
  }

  template <typename Params>
  void fill_params(Params& p, Regions& regions) {
    p.B = B, p.N = N, p.V = V;
    p.logits = logits.data(), p.dtype = logits.dtype;
    p.stride_b = N * (V + gap), p.stride_n = V + gap;
    p.draft = draft_view(), p.accepted = poisoned();
    const size_t size = logits.dtype == DType::kFloat32 ? 4 : 2;
    Region of_logits{"logits", logits.data(), logits.bytes(), false, {}};
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t n = 0; n < lengths[b]; ++n) of_logits.values.push_back({at(b, n, 0) * size, V * size});
    }
    regions.push_back(of_logits);
    add_region(regions, "tokens", tokens);
    if (tree) add_region(regions, "parents", parents);
    add_region(regions, "lengths", lengths);
    add_region(regions, "path", path, true);
    add_region(regions, "path_lengths", path_lengths, true);
    add_region(regions, "next_token", next_token, true);
  }

  void expect(int64_t b, int64_t leaf, int64_t token) const {
    std::vector<int32_t> want(P, 0);
    int32_t length = 0;
    for (int64_t n = leaf; n >= 0; n = parent(b, n)) ++length;
    for (int64_t n = leaf, i = length; n >= 0; n = parent(b, n)) want[--i] = static_cast<int32_t>(n);
    EXPECT_EQ(std::vector<int32_t>(path.begin() + b * P, path.begin() + (b + 1) * P), want)
        << "sequence " << b;
    EXPECT_EQ(path_lengths[b], length) << "sequence " << b;
    EXPECT_EQ(next_token[b], token) << "sequence " << b;
  }

  // --- greedy ---

  int64_t argmax(int64_t b, int64_t n) const {
    const Row r(row(b, n), {0.0f});
    return r.good ? std::find(r.probs.begin(), r.probs.end(), 1.0f) - r.probs.begin() : -1;
  }

  void check_greedy() {
    AcceptGreedyParams p;
    Regions regions;
    fill_params(p, regions);
    ASSERT_EQ(TestBackend::call(p, regions), Status::kOk);
    for (int64_t b = 0; b < B; ++b) {
      if (lengths[b] == 0) {
        expect(b, -1, 0);
        continue;
      }
      std::vector<int64_t> depth(N, -1);
      int64_t leaf = depth[0] = 0;
      for (int64_t n = 1; n < lengths[b]; ++n) {
        const int64_t above = parent(b, n);
        if (depth[above] >= 0 && tokens[b * N + n] == argmax(b, above)) depth[n] = depth[above] + 1;
        if (depth[n] > depth[leaf]) leaf = n;
      }
      expect(b, leaf, argmax(b, leaf));
    }
  }

  // Most drafts become right.
  void draft_greedily() {
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t n = 1; n < lengths[b]; ++n) {
        const int64_t best = argmax(b, parent(b, n));
        if (best >= 0 && below(4) > 0) tokens[b * N + n] = best;
      }
    }
  }

  // --- sampled ---

  void check_sampled(bool drawn = true);
};

// What is left of each row, stored.
class PlainRows {
 public:
  PlainRows(const Round& round, int64_t b)
      : round_(round),
        b_(b),
        rows_(round.N),
        left_(round.N),
        weights_(round.N, true),
        rejected_(round.N),
        chance_(round.N),
        left_sum_(round.N),
        marks_(round.N, -1) {
    marks_[0] = 0;
  }

  bool without_replacement() const { return round_.rules[b_] == 2 || round_.rules[b_] == 5; }
  int64_t token(int node) const { return round_.tokens[b_ * round_.N + node]; }
  int parent(int node) const { return round_.parent(b_, node); }
  int first_child(int node) const { return child_after(node, node); }
  int next_sibling(int node) const { return child_after(parent(node), node); }
  int next_child(int node) const {
    int child = first_child(node);
    for (int i = 0; i < rejected_[node]; ++i) child = next_sibling(child);
    return child;
  }
  int rejected(int node) const { return rejected_[node]; }

  bool open(int node) {
    if (rows_[node].probs.empty()) {
      rows_[node] = Row(round_.row(b_, node), round_.settings(b_));
      restore(node);
    }
    return rows_[node].good;
  }

  void reject(int child, double factor, double scale) {
    const int node = parent(child);
    const std::vector<double> q = draft_row(child);
    for (int64_t i = 0; i < round_.V; ++i) {
      left_[node][i] = std::max(factor * left_[node][i] - scale * q[i], 0.0);
    }
    weights_[node] = false;
    ++rejected_[node];
  }

  void reject_all(int node, double inverse, double share) {
    const std::vector<double> q = draft_row(first_child(node));
    for (int64_t i = 0; i < round_.V; ++i) {
      double& p = left_[node][i];
      p = std::max(p - share * std::min(q[i], inverse * p), 0.0);
    }
    weights_[node] = false;
    while (next_child(node) >= 0) ++rejected_[node];
  }

  void restore(int node) {
    left_[node].assign(rows_[node].probs.begin(), rows_[node].probs.end());
    weights_[node] = true;
  }

  double p(int node, int64_t token) const { return left_[node][token]; }
  double q(int child) const { return draft_row(child)[token(child)]; }
  double q_left(int child) const { return tree_sum(draft_row(child)); }
  double sum(int node) const { return tree_sum(summed(node)); }

  double overlap(int node, double inverse) const {
    std::vector<double> both = draft_row(first_child(node));
    for (int64_t i = 0; i < round_.V; ++i) both[i] = std::min(both[i], inverse * left_[node][i]);
    return tree_sum(both);
  }

  int64_t draw(int node, double total, double u) const { return invert(summed(node), u * total); }

  double chance(int node) const { return chance_[node]; }
  double left(int node) const { return left_sum_[node]; }
  void keep(int node, double chance, double left) { chance_[node] = chance, left_sum_[node] = left; }

  int follow(int depth, int64_t wanted) {
    int first = -1;
    for (int n = round_.lengths[b_]; n-- > 1;) {
      if (token(n) == wanted && marks_[parent(n)] == depth - 1) marks_[n] = depth, first = n;
    }
    return first;
  }

 private:
  int child_after(int node, int before) const {
    for (int n = before + 1; n < round_.lengths[b_]; ++n) {
      if (parent(n) == node) return n;
    }
    return -1;
  }

  std::vector<double> draft_row(int child) const {
    const float* row =
        round_.draft_probs.data() + round_.draft_rows[b_ * round_.N + child] * (round_.V + round_.gap);
    std::vector<double> q(row, row + round_.V);
    for (int c = first_child(parent(child)); without_replacement() && c != child; c = next_sibling(c)) {
      q[token(c)] = 0.0;
    }
    return q;
  }

  std::vector<double> summed(int node) const {
    if (!weights_[node]) return left_[node];
    return {rows_[node].weights.begin(), rows_[node].weights.end()};
  }

  const Round& round_;
  int64_t b_;
  std::vector<Row> rows_;
  std::vector<std::vector<double>> left_;
  std::vector<bool> weights_;
  std::vector<int> rejected_;
  std::vector<double> chance_, left_sum_;
  std::vector<int> marks_;
};

void Round::check_sampled(bool drawn) {
  AcceptSampledParams p;
  Regions regions;
  fill_params(p, regions);
  if (drawn) {
    p.draft_probs = draft_probs.data(), p.draft_rows = draft_rows.data();
    p.R = R, p.draft_stride = V + gap;
    add_region(regions, "draft_probs", draft_probs);
    add_region(regions, "draft_rows", draft_rows);
  }
  p.rules = rules.data();
  p.sampling = {temperature.data(), top_k.data(), top_p.data(), min_p.data()};
  p.seeds = seeds.data(), p.positions = positions.data();
  add_region(regions, "rules", rules);
  add_region(regions, "temperature", temperature);
  add_region(regions, "top_k", top_k);
  add_region(regions, "top_p", top_p);
  add_region(regions, "min_p", min_p);
  add_region(regions, "seeds", seeds);
  add_region(regions, "positions", positions);
  ASSERT_EQ(TestBackend::call(p, regions), Status::kOk);
  for (int64_t b = 0; b < B; ++b) {
    if (lengths[b] == 0) {
      expect(b, -1, 0);
      continue;
    }
    PlainRows rows(*this, b);
    const Outcome want =
        AcceptanceWalk<PlainRows>(rows, seeds[b], positions[b]).run(static_cast<AcceptRule>(rules[b]));
    expect(b, want.leaf, want.next_token);
  }
}

}  // namespace
}  // namespace specdec::test
