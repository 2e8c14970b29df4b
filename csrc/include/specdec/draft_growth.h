// The growth of draft trees, level by level: python/specdec/drafters/tree.py in C++, so that a
// drafter whose level takes a tenth of a millisecond need not leave C++ between two of them. The rules and
// their reasons stand there; the same numbers come out, bit for bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

namespace specdec {

// What all trees of a call have in common.
struct GrowthRules {
  std::vector<int64_t> branching;  // children by depth, the last number goes on; none 0
  bool pruned = false;
  double tau = 0.0;               // of a pruned tree: how far below the best chance a node may be, in nats
  int64_t most_run = 0;           // nodes of a pruned tree that are run, at most
  std::vector<double> edges;      // of the bins of probabilities, ascending
  double most_chance = 1.0;       // no draft is certain
  double child_chance = 1.0;      // hoped of a node's best child
  double level_price = 0.0;       // tokens that a level must bring, all priced rows together
  const int64_t* ends = nullptr;  // tokens that end a text
  int64_t end_count = 0;

  int64_t children(int64_t depth) const {
    return branching[std::min<int64_t>(depth, static_cast<int64_t>(branching.size()) - 1)];
  }

  bool ends_text(int64_t token) const { return std::find(ends, ends + end_count, token) != ends + end_count; }
};

// What one sequence asks for.
struct GrowthRequest {
  int64_t max_nodes = 0, deepest = 0;
  bool priced = false;
  double node_price = 0.0;
  const double* ratios = nullptr;  // [ranks, bins] chance over probability; the last rank goes on
  int64_t ranks = 0;
  double threshold = 0.0;  // nothing is drafted below a token that the drafter is less sure of
  bool drawn = false;      // a chain of drawn tokens, whose chances are their probabilities
};

// Node 0 is the last emitted token, draft i is node i + 1.
struct GrownNode {
  int64_t token, parent, rank;
  double chance, probability;
  int64_t column;    // among the nodes that the drafter has run; -1: it has not
  int64_t row = -1;  // of all rows that were drawn from; -1: it was not
  bool open = true;  // the drafter is sure enough to go on below it
};

class GrowingTree {
 public:
  GrowingTree(const GrowthRules& rules, const GrowthRequest& request, int64_t root_column)
      : rules_(rules), request_(request) {
    nodes.push_back({-1, -1, 0, 1.0, 1.0, root_column});
    level_.push_back(0);
  }

  std::vector<GrownNode> nodes;

  int64_t drafts() const { return static_cast<int64_t>(nodes.size()) - 1; }
  int64_t depth() const { return depth_; }
  bool priced() const { return request_.priced; }
  const std::vector<int64_t>& wanted() const { return wanted_; }  // of the last `choose`

  // Chooses which nodes of the last level get children; what priced ones are hoped to bring.
  double choose() {
    wanted_ = expandable();
    if (depth_ == 0 || !request_.priced) return 0.0;
    double gain = 0.0;
    const auto hope = [&](int64_t node) {
      return nodes[node].chance * rules_.child_chance - request_.node_price;
    };
    wanted_.erase(std::remove_if(wanted_.begin(), wanted_.end(), [&](int64_t n) { return !(hope(n) > 0.0); }),
                  wanted_.end());
    for (int64_t node : wanted_) gain += hope(node);
    return gain;
  }

  void cut(int64_t room) {
    if (static_cast<int64_t>(wanted_.size()) > room) wanted_.resize(std::max<int64_t>(room, 0));
  }

  // Fixes how many children the wanted nodes get; the most of them.
  int64_t ask() {
    const int64_t children = rules_.children(depth_), parents = static_cast<int64_t>(wanted_.size());
    counts_.assign(parents, children);
    if (parents > 0 && !rules_.pruned) {
      const int64_t left = std::min(request_.max_nodes - drafts(), children * parents);
      for (int64_t i = 0; i < parents; ++i) counts_[i] = left / parents + (i < left % parents);
    }
    return parents == 0 ? 0 : *std::max_element(counts_.begin(), counts_.end());
  }

  // The wanted nodes are run, in their order, and stand from this column on.
  void run(int64_t column) {
    run_ += static_cast<int64_t>(wanted_.size());
    for (int64_t node : wanted_) nodes[node].column = column++;
  }

  // Adds the children of the wanted nodes: of each a row of `stride` tokens, -1 where there are no more,
  // their probabilities, and how sure the drafter itself is of them. Where they were drawn, `row` is the
  // number of the first wanted node's row among all rows that were drawn from.
  void grow(const int64_t* tokens, const float* probabilities, const double* sure, int64_t stride,
            int64_t row = -1) {
    level_.clear();
    ++depth_;
    for (size_t i = 0; i < wanted_.size(); ++i, tokens += stride, probabilities += stride, sure += stride) {
      const int64_t parent = wanted_[i];
      for (int64_t rank = 0; rank < counts_[i] && tokens[rank] >= 0; ++rank) {
        const double probability = probabilities[rank];
        level_.push_back(static_cast<int64_t>(nodes.size()));
        nodes.push_back({tokens[rank], parent, rank, nodes[parent].chance * chance_of(probability, rank),
                         probability, -1, row < 0 ? -1 : row + static_cast<int64_t>(i),
                         sure[rank] >= request_.threshold});
      }
    }
  }

 private:
  double chance_of(double probability, int64_t rank) const {
    if (request_.drawn) return probability;
    const auto& edges = rules_.edges;
    const int64_t bin = std::upper_bound(edges.begin(), edges.end(), probability) - edges.begin();
    const int64_t bins = static_cast<int64_t>(edges.size()) + 1;
    const double ratio = request_.ratios[std::min(rank, request_.ranks - 1) * bins + bin];
    return std::min(probability * ratio, rules_.most_chance);
  }

  std::vector<int64_t> expandable() const {
    std::vector<int64_t> open;
    if (depth_ >= request_.deepest) return open;
    for (int64_t node : level_) {
      if (nodes[node].open && !rules_.ends_text(nodes[node].token)) open.push_back(node);
    }
    if (!rules_.pruned) {
      const int64_t left = std::max<int64_t>(request_.max_nodes - drafts(), 0);
      if (static_cast<int64_t>(open.size()) > left) open.resize(left);
      return open;
    }
    double best = drafts() == 0 ? 1.0 : 0.0;
    for (size_t i = 1; i < nodes.size(); ++i) best = std::max(best, nodes[i].chance);
    double floor = best * std::exp(-rules_.tau);
    if (drafts() > request_.max_nodes) floor = std::max(floor, nth_chance(request_.max_nodes));
    open.erase(std::remove_if(open.begin(), open.end(), [&](int64_t n) { return nodes[n].chance < floor; }),
               open.end());
    std::stable_sort(open.begin(), open.end(),
                     [&](int64_t a, int64_t b) { return nodes[a].chance > nodes[b].chance; });
    // Halved: twice any number may be too large for the type.
    const bool few = request_.max_nodes <= rules_.most_run / 2;
    const int64_t room = std::max<int64_t>((few ? 2 * request_.max_nodes : rules_.most_run) - run_, 0);
    if (static_cast<int64_t>(open.size()) > room) open.resize(room);
    return open;
  }

  // The n-th greatest chance of a draft, counted from 1.
  double nth_chance(int64_t n) const {
    std::vector<double> chances;
    for (size_t i = 1; i < nodes.size(); ++i) chances.push_back(nodes[i].chance);
    std::nth_element(chances.begin(), chances.begin() + (n - 1), chances.end(), std::greater<double>());
    return chances[n - 1];
  }

  const GrowthRules& rules_;
  const GrowthRequest request_;
  std::vector<int64_t> level_, wanted_, counts_;  // counts_: children of each wanted node
  int64_t depth_ = 0, run_ = 0;
};

}  // namespace specdec
