// A suffix automaton that grows token by token and remembers where each short context was seen last.
//
// The automaton of n tokens has at most 2n states and 3n transitions whatever the vocabulary (Blumer et al.,
// "The smallest automaton recognizing the subwords of a text", 1985). Transitions lie in one pool, threaded
// per state for enumeration and hashed by (state, token) for lookup, so memory is linear in the text and an
// append is amortised O(1), plus one step per distinct context of at most max_match + 1 tokens that ends at
// the new token.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace specdec {

class SuffixAutomaton {
 public:
  // A suffix of the text that occurred before.
  struct Match {
    int32_t length = 0;  // tokens, at most max_match; 0: the last token is new
    int32_t end = -1;    // where its most recent earlier occurrence ends (an index into the text)
  };

  // A forest of continuations, parents before children; the best continuation is the first.
  struct Continuations {
    std::vector<int32_t> tokens, parents;  // parent -1: follows the text
    int32_t match_length = 0;
    bool chain = true;
  };

  // Longer matches than max_match (>= 1) are not told apart: they count as max_match.
  explicit SuffixAutomaton(int32_t max_match) : max_match_(max_match) { clear(); }

  // Forgets the text; keeps the memory.
  void clear() {
    text_.clear();
    edges_.clear();
    states_.clear();
    states_.push_back(State{});
    std::fill(table_.begin(), table_.end(), -1);
    last_ = window_ = window_length_ = 0;
    contexts_.clear();
  }

  void append(int32_t token) {
    extend(token);
    text_.push_back(token);
    move_window(token);
    const int32_t end = size() - 1;
    contexts_.clear();
    for (int32_t s = window_; s != 0; s = states_[s].link) {
      contexts_.push_back({s, std::min(states_[s].length, window_length_), states_[s].end});
      states_[s].end = end;
    }
  }

  int32_t size() const { return static_cast<int32_t>(text_.size()); }

  // The longest suffix of at most max_match tokens that has an earlier occurrence.
  Match match() const {
    const size_t first = longest_match();
    if (first == contexts_.size()) return {};
    return {std::min(contexts_[first].length, max_match_), contexts_[first].end};
  }

  // What followed the text's current suffix before. The first path continues the most recent earlier
  // occurrence of the longest match, as far as max_depth; a copy that reaches the end of the text goes on
  // with its own tokens, as a period would. With branches > 1, other tokens that followed the match (the most
  // recently seen first), then what followed shorter suffixes down to min_match, merge into the tree until it
  // has `branches` paths or max_nodes nodes. Empty where no suffix of min_match tokens occurred before.
  Continuations propose(int32_t min_match, int32_t max_nodes, int32_t max_depth, int32_t branches) const {
    Continuations tree;
    size_t context = longest_match();
    if (context == contexts_.size()) return tree;
    tree.match_length = std::min(contexts_[context].length, max_match_);
    if (tree.match_length < min_match || max_nodes <= 0 || max_depth <= 0 || branches <= 0) return tree;
    int32_t paths = add_path(contexts_[context].end + 1, max_nodes, max_depth, tree);
    std::vector<int32_t> starts;
    for (; context < contexts_.size() && contexts_[context].length >= min_match; ++context) {
      if (paths >= branches || full(tree, max_nodes)) break;
      starts.clear();
      for (int32_t e = states_[contexts_[context].state].first_edge; e >= 0; e = edges_[e].next) {
        starts.push_back(states_[edges_[e].target].end);
      }
      // A path may repeat one that a longer context gave, so more than `branches` of them can be needed.
      std::sort(starts.begin(), starts.end(), [](int32_t a, int32_t b) { return a > b; });
      for (const int32_t start : starts) {
        if (paths >= branches || full(tree, max_nodes)) break;
        paths += add_path(start, max_nodes, max_depth, tree);
      }
    }
    return tree;
  }

  // Bytes held.
  size_t memory() const {
    return text_.capacity() * sizeof(int32_t) + states_.capacity() * sizeof(State) +
           edges_.capacity() * sizeof(Edge) + table_.capacity() * sizeof(int32_t) +
           contexts_.capacity() * sizeof(Context);
  }

 private:
  struct State {
    int32_t length = 0;  // of its longest string
    int32_t link = -1;
    int32_t first_edge = -1;
    // Where its strings occurred last; kept for states with a string of at most max_match + 1 tokens.
    int32_t end = -1;
  };
  struct Edge {
    int32_t state, token, target, next;
  };
  struct Context {  // a state on the suffix path of the text
    int32_t state, length;
    int32_t end;  // where it occurred last before the current end of the text; -1: nowhere
  };

  static bool full(const Continuations& tree, int32_t max_nodes) {
    return static_cast<int32_t>(tree.tokens.size()) >= max_nodes;
  }

  // The first context that is a match. The window holds one token more than max_match (the step from a match
  // to the token behind it), so a context of that length is passed over where the next one is exactly
  // max_match long.
  size_t longest_match() const {
    size_t i = 0;
    if (contexts_.size() > 1 && contexts_[0].length > max_match_ && contexts_[1].length == max_match_) i = 1;
    while (i < contexts_.size() && contexts_[i].end < 0) ++i;
    return i;
  }

  // Merges the text from position `start` into the tree. Returns whether it added a node.
  bool add_path(int32_t start, int32_t max_nodes, int32_t max_depth, Continuations& tree) const {
    const int32_t before = static_cast<int32_t>(tree.tokens.size());
    path_.clear();
    int32_t node = -1;
    for (int32_t depth = 0; depth < max_depth; ++depth) {
      const int32_t position = start + depth;
      const int32_t token = position < size() ? text_[position] : path_[position - size()];
      path_.push_back(token);
      int32_t child = node + 1;
      while (child < before && (tree.parents[child] != node || tree.tokens[child] != token)) ++child;
      if (child >= before) {
        if (full(tree, max_nodes)) break;
        child = static_cast<int32_t>(tree.tokens.size());
        tree.chain = tree.chain && node == child - 1;
        tree.tokens.push_back(token);
        tree.parents.push_back(node);
      }
      node = child;
    }
    return static_cast<int32_t>(tree.tokens.size()) > before;
  }

  // Blumer's online construction.
  void extend(int32_t token) {
    const int32_t current = static_cast<int32_t>(states_.size());
    states_.push_back(State{});
    states_[current].length = states_[last_].length + 1;
    int32_t p = last_, edge = -1;
    for (; p >= 0 && (edge = find(p, token)) < 0; p = states_[p].link) insert(p, token, current);
    states_[current].link = p < 0 ? 0 : split(p, token, edges_[edge].target);
    last_ = current;
  }

  // The state of exactly the string (longest of p) + token, which is in q: q itself or a clone of q for its
  // short strings.
  int32_t split(int32_t p, int32_t token, int32_t q) {
    if (states_[p].length + 1 == states_[q].length) return q;
    const int32_t clone = static_cast<int32_t>(states_.size());
    states_.push_back(states_[q]);
    states_[clone].length = states_[p].length + 1;
    states_[clone].first_edge = -1;
    for (int32_t e = states_[q].first_edge; e >= 0; e = edges_[e].next)
      insert(clone, edges_[e].token, edges_[e].target);
    states_[q].link = clone;
    for (int32_t edge; p >= 0 && (edge = find(p, token)) >= 0 && edges_[edge].target == q;
         p = states_[p].link) {
      edges_[edge].target = clone;
    }
    return clone;
  }

  // Follows the suffix of at most max_match + 1 tokens. One token leaves at the front, so at most one link is
  // taken.
  void move_window(int32_t token) {
    window_ = edges_[find(window_, token)].target;
    window_length_ = std::min(window_length_ + 1, max_match_ + 1);
    if (window_length_ <= states_[states_[window_].link].length) window_ = states_[window_].link;
  }

  size_t bucket(int32_t state, int32_t token) const {
    const uint64_t key =
        static_cast<uint64_t>(static_cast<uint32_t>(state)) << 32 | static_cast<uint32_t>(token);
    uint64_t hash = key * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 32;
    return static_cast<size_t>(hash * 0xD6E8FEB86659FD93u >> 32) & (table_.size() - 1);
  }

  int32_t find(int32_t state, int32_t token) const {
    if (table_.empty()) return -1;
    for (size_t i = bucket(state, token);; i = (i + 1) & (table_.size() - 1)) {
      const int32_t e = table_[i];
      if (e < 0 || (edges_[e].state == state && edges_[e].token == token)) return e;
    }
  }

  void insert(int32_t state, int32_t token, int32_t target) {
    if (2 * (edges_.size() + 1) > table_.size()) {
      table_.assign(std::max<size_t>(64, 2 * table_.size()), -1);
      for (size_t e = 0; e < edges_.size(); ++e) place(static_cast<int32_t>(e));
    }
    edges_.push_back({state, token, target, states_[state].first_edge});
    states_[state].first_edge = static_cast<int32_t>(edges_.size()) - 1;
    place(states_[state].first_edge);
  }

  void place(int32_t edge) {
    size_t i = bucket(edges_[edge].state, edges_[edge].token);
    while (table_[i] >= 0) i = (i + 1) & (table_.size() - 1);
    table_[i] = edge;
  }

  int32_t max_match_;
  std::vector<int32_t> text_;
  std::vector<State> states_;
  std::vector<Edge> edges_;
  std::vector<int32_t> table_;  // open addressing, at most half full; edge indices, -1: free
  int32_t last_ = 0;            // the state of the whole text
  int32_t window_ = 0, window_length_ = 0;
  std::vector<Context> contexts_;      // longest first
  mutable std::vector<int32_t> path_;  // scratch of add_path
};

}  // namespace specdec
