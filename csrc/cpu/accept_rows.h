// The rows of one sequence, as AcceptanceWalk wants them. The weights of the target's rows are stored (rules
// that only go down store one row); what is left of a row after rejections is made from them wherever it is
// summed or drawn from, which costs less than the memory it would fill.
#pragma once

#include "accept_tree.h"
#include "scratch.h"
#include "specdec/acceptance_rules.h"
#include "target_row.h"

namespace specdec::cpu::SPECDEC_ISA {

// What is left of p after the rejection of siblings, in their order, with the rows they were drawn from.
template <typename T>
struct LeftElements {
  TargetElements<T> p;
  const double* factors = nullptr;     // [count]
  const double* scales = nullptr;      // [count]
  const float* const* rows = nullptr;  // [count]
  const int64_t* tokens = nullptr;     // [count] the siblings'; null: their rows are whole
  int64_t count = 0;

  double at(int64_t i) const {
    double x = p.at(i);
    const int64_t elder = tokens != nullptr ? place_of(i, tokens, count) : count;
    for (int64_t c = 0; c < count; ++c) {
      const double q = c > elder ? 0.0 : static_cast<double>(rows[c][i]);
      const double rest = factors[c] * x - scales[c] * q;
      x = rest > 0.0 ? rest : 0.0;
    }
    return x;
  }
  SPECDEC_INLINE DoublePair pair(int64_t i) const {
    DoublePair x = p.pair(i);
    const Doubles zero = Doubles::set(0.0);
    for (int64_t c = 0; c < count; ++c) {
      const DoublePair q = widen(Vec::load(rows[c] + i));
      const Doubles factor = Doubles::set(factors[c]), scale = Doubles::set(scales[c]);
      x.low = larger(factor * x.low - scale * q.low, zero);
      x.high = larger(factor * x.high - scale * q.high, zero);
    }
    return x;
  }
  bool plain(int64_t segment) const { return tokens == nullptr || !any_in_segment(tokens, count, segment); }
};

// min(q, inverse p), or p - share min(q, inverse p).
template <typename T, bool kResidual>
struct OverlapElements {
  TargetElements<T> p;
  const float* q = nullptr;
  double inverse = 1.0, share = 0.0;

  double at(int64_t i) const {
    const double x = p.at(i), y = inverse * x, of_q = static_cast<double>(q[i]);
    const double both = of_q < y ? of_q : y;
    if (!kResidual) return both;
    const double rest = x - share * both;
    return rest > 0.0 ? rest : 0.0;
  }
  SPECDEC_INLINE DoublePair pair(int64_t i) const {
    const DoublePair x = p.pair(i), of_q = widen(Vec::load(q + i));
    return {of(x.low, of_q.low), of(x.high, of_q.high)};
  }
  bool plain(int64_t) const { return true; }

 private:
  SPECDEC_INLINE Doubles of(Doubles x, Doubles of_q) const {
    const Doubles both = smaller(of_q, Doubles::set(inverse) * x);
    return kResidual ? larger(x - Doubles::set(share) * both, Doubles::set(0.0)) : both;
  }
};

template <typename T>
class SampledRows {
 public:
  // Bytes of scratch that a sequence of the call wants.
  static int64_t scratch_bytes(const AcceptSampledParams& p) {
    int64_t keys = 0, listed = 0, stored = 0;
    for (int64_t b = 0; b < p.B; ++b) {
      if (valid_length(p.draft.lengths, b, p.N) == 0) continue;
      const Settings settings(p.sampling, b, p.V);
      keys = std::max(keys, keys_wanted(settings, p.V));
      listed = std::max(listed, listed_wanted(settings));
      stored = std::max(stored, rows_stored(static_cast<AcceptRule>(p.rules[b]), settings, p.N));
    }
    const int64_t sibling = 2 * sizeof(double) + sizeof(float*) + sizeof(int64_t);
    return p.N * (static_cast<int64_t>(sizeof(Node)) + sibling +
                  listed * static_cast<int64_t>(sizeof(int32_t))) +
           (p.N + 1) * parts_of(p.V) * static_cast<int64_t>(sizeof(double)) +
           keys * static_cast<int64_t>(sizeof(Key)) + stored * p.V * static_cast<int64_t>(sizeof(float)) + 8;
  }

  // `scratch` is aligned to 8 bytes and lives as long as this.
  SampledRows(const AcceptSampledParams& p, int64_t b, char* scratch)
      : p_(p),
        b_(b),
        tree_(p.draft, b, p.N),
        settings_(p.sampling, b, p.V),
        rule_(static_cast<AcceptRule>(p.rules[b])) {
    const int64_t N = tree_.length;
    nodes_ = take<Node>(scratch, N);
    parts_ = take<double>(scratch, N * parts_of(p.V));
    spare_parts_ = take<double>(scratch, parts_of(p.V));
    factors_ = take<double>(scratch, N);
    scales_ = take<double>(scratch, N);
    rows_ = take<const float*>(scratch, N);
    tokens_ = take<int64_t>(scratch, N);
    keys_ = take<Key>(scratch, keys_wanted(settings_, p.V));
    listed_ = take<int32_t>(scratch, N * listed_wanted(settings_));
    stored_ = take<float>(scratch, rows_stored(rule_, settings_, N) * p.V);
    for (int64_t n = 0; n < N; ++n) new (&nodes_[n]) Node();
    for (int64_t n = N; n-- > 1;) {
      Node& above = nodes_[tree_.parent(n)];
      nodes_[n].next_sibling = above.first_child;
      above.first_child = above.next_child = static_cast<int>(n);
    }
    nodes_[0].mark = 0;
  }

  const DraftTree& tree() const { return tree_; }

  bool without_replacement() const {
    return rule_ == AcceptRule::kRecursiveWithoutReplacement ||
           rule_ == AcceptRule::kTraversalWithoutReplacement;
  }
  int64_t token(int node) const { return tree_.tokens[node]; }
  int parent(int node) const { return tree_.parent(node); }
  int first_child(int node) const { return nodes_[node].first_child; }
  int next_sibling(int node) const { return nodes_[node].next_sibling; }
  int next_child(int node) const { return nodes_[node].next_child; }
  int rejected(int node) const { return nodes_[node].rejected; }
  double chance(int node) const { return nodes_[node].chance; }
  double left(int node) const { return nodes_[node].left; }

  void keep(int node, double chance, double left) {
    nodes_[node].chance = chance;
    nodes_[node].left = left;
  }

  bool open(int node) {
    Node& n = nodes_[node];
    if (!n.open) {
      const T* logits = static_cast<const T*>(p_.logits) + b_ * p_.stride_b + node * p_.stride_n;
      float* stored = stored_ + (comes_back(rule_) ? node * p_.V : 0);
      n.open = n.row.make(logits, p_.V, settings_,
                          {parts(node), keys_, listed_ + node * listed_wanted(settings_), stored});
    }
    return n.open;
  }

  void reject(int child, double factor, double scale) {
    nodes_[child].factor = factor;
    nodes_[child].scale = scale;
    Node& n = nodes_[parent(child)];
    n.next_child = nodes_[child].next_sibling;
    n.left_of = Left::kSiblings;
    ++n.rejected;
  }

  void reject_all(int node, double inverse, double share) {
    Node& n = nodes_[node];
    n.factor = inverse;
    n.scale = share;
    n.left_of = Left::kKSeq;
    for (; n.next_child >= 0; n.next_child = nodes_[n.next_child].next_sibling) ++n.rejected;
  }

  void restore(int node) { nodes_[node].left_of = Left::kRestored; }

  double p(int node, int64_t token) {
    return visit_left(node, true, [&](const auto& elements) { return elements.at(token); });
  }

  double q(int child) const {
    if (without_replacement()) {
      for (int c = first_child(parent(child)); c != child; c = next_sibling(c)) {
        if (token(c) == token(child)) return 0.0;
      }
    }
    return static_cast<double>(draft_row(child)[token(child)]);
  }

  double q_left(int child) {
    int64_t count = 0;
    for (int c = first_child(parent(child)); c != child; c = next_sibling(c)) tokens_[count++] = token(c);
    return sum_parts(GivenElements{draft_row(child), tokens_, count}, p_.V, Support{}, spare_parts_);
  }

  double sum(int node) {
    const Node& n = nodes_[node];
    if (n.left_of == Left::kWhole) return n.row.total;
    return visit_left(node, false, [&](const auto& elements) {
      return sum_parts(elements, p_.V, n.row.support, parts(node));
    });
  }

  double overlap(int node, double inverse) {
    const TargetRow<T>& row = nodes_[node].row;
    const OverlapElements<T, false> elements{row.probabilities(), draft_row(first_child(node)), inverse, 0.0};
    return sum_parts(elements, p_.V, row.support, spare_parts_);
  }

  // The last sum was this node's.
  int64_t draw(int node, double total, double u) {
    return visit_left(node, false, [&](const auto& elements) {
      return draw_from(elements, p_.V, nodes_[node].row.support, parts(node), u * total);
    });
  }

  int follow(int depth, int64_t token) {
    int first = -1;
    for (int n = 1; n < tree_.length; ++n) {
      if (tree_.tokens[n] != token || nodes_[parent(n)].mark != depth - 1) continue;
      nodes_[n].mark = depth;
      if (first < 0) first = n;
    }
    return first;
  }

 private:
  enum class Left { kWhole, kSiblings, kKSeq, kRestored };

  struct Node {
    int first_child = -1, next_sibling = -1;
    int next_child = -1, rejected = 0;  // of its children
    int mark = -1;                      // the depth at which the walk follows
    bool open = false;
    Left left_of = Left::kWhole;
    double chance = 0.0, left = 0.0;
    double factor = 1.0, scale = 0.0;  // of its own rejection; of all its children's, under kKSeq
    TargetRow<T> row;
  };

  // Whether the rule asks for the row of a node again after it opened one further down.
  static bool comes_back(AcceptRule rule) {
    return rule == AcceptRule::kTraversal || rule == AcceptRule::kTraversalWithoutReplacement;
  }
  static int64_t rows_stored(AcceptRule rule, const Settings& settings, int64_t N) {
    return listed_wanted(settings) > 0 ? 0 : comes_back(rule) ? N : 1;
  }

  template <typename U>
  static U* take(char*& scratch, int64_t count) {
    U* taken = reinterpret_cast<U*>(scratch);
    scratch += count * static_cast<int64_t>(sizeof(U));
    return taken;
  }

  double* parts(int node) const { return parts_ + node * parts_of(p_.V); }

  const float* draft_row(int node) const {
    return p_.draft_probs + p_.draft_rows[b_ * p_.N + node] * p_.draft_stride;
  }

  // f(the elements of what is left at the node). Of a whole row: its weights, or `as_probability`.
  template <typename F>
  auto visit_left(int node, bool as_probability, const F& f) {
    const Node& n = nodes_[node];
    switch (n.left_of) {
      case Left::kSiblings: {
        int64_t count = 0;
        for (int c = n.first_child; count < n.rejected; c = next_sibling(c), ++count) {
          factors_[count] = nodes_[c].factor;
          scales_[count] = nodes_[c].scale;
          rows_[count] = draft_row(c);
          tokens_[count] = token(c);
        }
        return f(LeftElements<T>{n.row.probabilities(), factors_, scales_, rows_,
                                 without_replacement() ? tokens_ : nullptr, count});
      }
      case Left::kKSeq:
        return f(
            OverlapElements<T, true>{n.row.probabilities(), draft_row(n.first_child), n.factor, n.scale});
      case Left::kWhole:
      case Left::kRestored:
        break;
    }
    return f(as_probability ? n.row.probabilities() : n.row.weights());
  }

  const AcceptSampledParams& p_;
  int64_t b_;
  DraftTree tree_;
  Settings settings_;
  AcceptRule rule_;
  Node* nodes_ = nullptr;
  double* parts_ = nullptr;        // [N, parts] of the last sum at a node
  double* spare_parts_ = nullptr;  // [parts]
  double *factors_ = nullptr, *scales_ = nullptr;
  const float** rows_ = nullptr;
  int64_t* tokens_ = nullptr;
  Key* keys_ = nullptr;
  int32_t* listed_ = nullptr;
  float* stored_ = nullptr;  // [rows_stored, V]
};

}  // namespace specdec::cpu::SPECDEC_ISA
