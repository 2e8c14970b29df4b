// Acceptance and sampling against the rules as one reads them. The arithmetic is defined to the bit, so every
// decision and probability has to be the same. Included by the tests of a backend, which define TestBackend
// before.
#pragma once

#include "acceptance_problem.h"

namespace specdec::test {
namespace {

// V around segments and parts, some chains, some trees, every dtype.
std::vector<Round> rounds(unsigned seed) {
  std::vector<Round> out;
  for (const int64_t V : {1, 2, 5, 127, 128, 129, 1000, 4096, 8193}) {
    if (V > TestBackend::kMostV) continue;
    for (const bool tree : {false, true}) {
      const DType dtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
      const int64_t N = V > 1000 ? 7 : 12;
      out.emplace_back(V > 1000 ? 6 : 12, N, V, tree, dtypes[seed % 3], seed);
      ++seed;
    }
  }
  return out;
}

TEST(AcceptGreedy, FollowsTheRule) {
  for (Round& round : rounds(1)) {
    round.draft_greedily();
    round.check_greedy();
  }
}

TEST(AcceptGreedy, RowsThatHaveNoArgmax) {
  Round round(24, 6, 300, true, DType::kFloat32, 5);
  for (int64_t b = 0; b < round.B; ++b) {
    const int64_t n = round.below(3), kind = b % 4;
    for (int64_t i = 0; i < round.V; ++i) {
      if (kind == 0) round.logits.set(round.at(b, n, i), -INFINITY);
    }
    if (kind == 1) round.logits.set(round.at(b, n, round.below(round.V)), kNaN);
    if (kind == 2) round.logits.set(round.at(b, n, round.below(round.V)), INFINITY);
    if (kind == 3) round.logits.set(round.at(b, n, round.V - 1), -kNaN);
  }
  round.draft_greedily();
  round.check_greedy();
  EXPECT_GT(std::count(round.next_token.begin(), round.next_token.end(), -1), 3);
  round.check_sampled();
  EXPECT_GT(std::count(round.next_token.begin(), round.next_token.end(), -1), 3);
}

TEST(AcceptSampled, FollowsTheRules) {
  for (unsigned seed = 2; seed < 2 + 3 * TestBackend::kRepeats; seed += 3) {
    for (Round& round : rounds(seed)) round.check_sampled();
  }
}

// Siblings that repeat a token, stars and bushes, under every rule.
TEST(AcceptSampled, SmallVocabularies) {
  int64_t accepted = 0;
  for (unsigned seed = 0; seed < 20 * TestBackend::kRepeats; ++seed) {
    Round round(12, 10, 2 + seed % 5, true, DType::kFloat32, seed);
    round.check_sampled();
    for (const int32_t length : round.path_lengths) accepted += std::max(length - 1, 0);
  }
  EXPECT_GT(accepted, 20 * TestBackend::kRepeats);
}

TEST(AcceptSampled, DraftsThatWereNotDrawn) {
  Round round(8, 9, 50, true, DType::kFloat32, 3);
  std::fill(round.rules.begin(), round.rules.end(), 0);
  round.check_sampled(false);
}

// Where p is q, every draft of a recursion is accepted; disjoint supports accept none.
TEST(AcceptSampled, EqualAndDisjointRows) {
  for (const bool equal : {true, false}) {
    Round round(12, 5, 260, false, DType::kFloat32, 11);
    for (int64_t b = 0; b < round.B; ++b) {
      round.set(b, {});
      if (round.rules[b] == 0) round.rules[b] = 1;
      for (int64_t n = 0; n < round.lengths[b]; ++n) {
        for (int64_t i = 0; i < round.V; ++i) {
          if (!equal && i % 2 == 0) round.logits.set(round.at(b, n, i), -INFINITY);
        }
        const Row p(round.row(b, n), {});
        for (int64_t i = 0; i < round.V; ++i) {
          round.draft_probs[round.at(b, n, i)] = equal ? p.probs[i] : i % 2 == 0 ? 2.0f / round.V : 0.0f;
        }
        if (n > 0) {
          int64_t& token = round.tokens[b * round.N + n];
          do token = round.below(round.V);
          while (!(round.draft_probs[round.at(b, n - 1, token)] > 0.0f));
        }
      }
    }
    round.check_sampled();
    for (int64_t b = 0; b < round.B; ++b) {
      EXPECT_EQ(round.path_lengths[b], equal ? round.lengths[b] : std::min(round.lengths[b], 1)) << b;
    }
  }
}

// A sequence's decision does not depend on those beside it.
TEST(AcceptSampled, BatchesDoNotMix) {
  Round all(12, 8, 700, true, DType::kFloat32, 21);
  all.check_sampled();
  for (const int64_t b : {0, 1, 2, 5}) {
    Round one(1, 8, 700, true, DType::kFloat32, 22);
    one.lengths = {all.lengths[b]}, one.rules = {all.rules[b]};
    one.seeds = {all.seeds[b]}, one.positions = {all.positions[b]};
    one.set(0, all.settings(b));
    for (int64_t n = 0; n < one.N; ++n) {
      one.tokens[n] = all.tokens[b * all.N + n];
      one.parents[n] = all.parents[b * all.N + n];
      one.draft_rows[n] = n > 0 && n < one.lengths[0] ? one.parents[n] : 1 << 30;
      for (int64_t i = 0; i < one.V; ++i) {
        one.logits.set(one.at(0, n, i), static_cast<float>(all.logits[all.at(b, n, i)]));
        one.draft_probs[one.at(0, n, i)] = all.draft_probs[all.at(b, n, i)];
      }
    }
    one.check_sampled();
    EXPECT_TRUE(std::equal(one.path.begin(), one.path.end(), all.path.begin() + b * all.P));
    EXPECT_EQ(one.next_token[0], all.next_token[b]);
  }
}

TEST(SamplingProbs, SameBits) {
  unsigned seed = 31;
  for (Round& round : rounds(seed)) {
    const int64_t rows = round.B * round.N;
    std::vector<float> probs(rows * round.V, -7.0f), temperature, top_p, min_p;
    std::vector<int32_t> top_k;
    for (int64_t b = 0; b < round.B; ++b) {
      for (int64_t n = 0; n < round.N; ++n) {
        const Settings s = round.settings(b);
        temperature.push_back(s.temperature), top_k.push_back(s.top_k);
        top_p.push_back(s.top_p), min_p.push_back(s.min_p);
      }
    }
    SamplingProbsParams p;
    p.R = rows, p.V = round.V, p.logits = round.logits.data(), p.dtype = round.logits.dtype;
    p.stride = round.V + round.gap;
    p.sampling = {temperature.data(), top_k.data(), top_p.data(), min_p.data()};
    p.probs = probs.data();
    Regions regions{{"logits", round.logits.data(), round.logits.bytes(), false, {}}};
    add_region(regions, "temperature", temperature);
    add_region(regions, "top_k", top_k);
    add_region(regions, "top_p", top_p);
    add_region(regions, "min_p", min_p);
    add_region(regions, "probs", probs, true);
    ASSERT_EQ(TestBackend::call(p, regions), Status::kOk);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t b = r / round.N;
      const Row want(round.row(b, r % round.N), round.settings(b));
      for (int64_t i = 0; i < round.V; ++i) {
        const float got = probs[r * round.V + i];
        ASSERT_TRUE(want.good ? got == want.probs[i] : std::isnan(got))
            << "V " << round.V << " row " << r << " token " << i;
      }
    }
  }
}

TEST(DrawTokens, BothKinds) {
  for (const bool replacement : {true, false}) {
    for (const int64_t K : {1, 4, 30}) {
      Round round(4, 5, 600, false, DType::kFloat32, 41 + static_cast<unsigned>(K));
      DrawParams p;
      p.R = round.R, p.V = round.V, p.K = K, p.replacement = replacement;
      p.probs = round.draft_probs.data(), p.stride = round.V + round.gap;
      std::vector<uint64_t> seeds;
      std::vector<int64_t> positions, tokens(p.R * K, -7);
      std::vector<int32_t> nodes;
      for (int64_t r = 0; r < p.R; ++r) {
        seeds.push_back(round.seeds[r / round.N]), positions.push_back(round.positions[r / round.N]);
        nodes.push_back(static_cast<int32_t>(r % round.N));
      }
      p.seeds = seeds.data(), p.positions = positions.data(), p.nodes = nodes.data(),
      p.tokens = tokens.data();
      Regions regions;
      add_region(regions, "probs", round.draft_probs);
      add_region(regions, "seeds", seeds);
      add_region(regions, "positions", positions);
      add_region(regions, "nodes", nodes);
      add_region(regions, "tokens", tokens, true);
      ASSERT_EQ(TestBackend::call(p, regions), Status::kOk);
      for (int64_t r = 0; r < p.R; ++r) {
        const float* q = p.probs + r * p.stride;
        const std::vector<double> row(q, q + p.V);
        std::vector<int64_t> want(K, -1);
        std::vector<std::pair<double, int64_t>> arrivals;
        for (int64_t x = 0; x < p.V; ++x) {
          const double u = uniform(seeds[r], positions[r], RandomStream::kRace, race_of(nodes[r], x));
          if (q[x] > 0.0f) arrivals.push_back({arrival_of(u, q[x]), x});
        }
        std::sort(arrivals.begin(), arrivals.end());
        for (int64_t k = 0; k < K; ++k) {
          const double u = uniform(seeds[r], positions[r], RandomStream::kDraft, draw_of(nodes[r], k));
          if (replacement && !arrivals.empty()) want[k] = invert(row, u * tree_sum(row));
          if (!replacement && k < static_cast<int64_t>(arrivals.size())) want[k] = arrivals[k].second;
        }
        EXPECT_EQ(std::vector<int64_t>(tokens.begin() + r * K, tokens.begin() + (r + 1) * K), want)
            << "row " << r;
      }
    }
  }
}

}  // namespace
}  // namespace specdec::test
