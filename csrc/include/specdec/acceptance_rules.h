// The rules of acceptance on sampled drafts, written once for every backend. docs/lossless.md states and
// proves them; specdec/acceptance has them in float64, which is what the proofs run.
//
// A backend brings the `Rows` of one sequence. On a GPU the lanes of one warp make every call together and
// get the same answer, so that all of them walk alike. What is left of the target's row at a node is the row
// p itself at first; then, for each child that was rejected, p <- max(factor p - scale q, 0) with the row q
// that the child was drawn from. Without replacement the tokens of elder siblings are zero in q.
//
//   bool without_replacement()
//   int64_t token(node); int parent(node), first_child(node), next_sibling(node)   -1 where there is none
//   bool open(node)            makes the target's row; false where it has no finite maximum or a NaN. Again:
//                              nothing
//   int rejected(node)         how many of its children were, eldest first
//   int next_child(node)       the eldest that was not
//   void reject(child, factor, scale)
//   void reject_all(node, inverse, share)   k-SEQ: all children; what is left becomes
//                              max(p - share min(q, inverse p), 0), q the row of the eldest child
//   void restore(node)         what is left is p again
//   double p(node, token)      what is left there
//   double q(child)            the child's own token in the row it was drawn from
//   double q_left(child)       the sum of that row without the tokens of elder siblings
//   double sum(node)           of what is left; while that is p, of its weights, which are drawn from
//   double overlap(node, inverse)   sum of min(q, inverse p), q the row of the eldest child
//   int64_t draw(node, total, u)   the token at which the cumulative sum of what is left passes u total
//   double chance(node), left(node); void keep(node, chance, left)   numbers of traversal
//   int follow(depth, token)   of the children of nodes at depth - 1 on the walk, those that carry the token
//                              are on it, too; the first of them, -1 where there is none. Node 0 is at 0
#pragma once

#include "specdec/acceptance_params.h"
#include "specdec/sampling_math.h"

namespace specdec {

struct Outcome {
  int leaf = 0;            // the last accepted node
  int64_t next_token = 0;  // -1: the row after it is none to draw from
};

template <typename Rows>
class AcceptanceWalk {
 public:
  SPECDEC_COMMON_MEMBER AcceptanceWalk(Rows& rows, uint64_t seed, int64_t position)
      : rows_(rows), seed_(seed), position_(position) {}

  SPECDEC_COMMON_MEMBER Outcome run(AcceptRule rule) {
    switch (rule) {
      case AcceptRule::kFollow:
        return follow();
      case AcceptRule::kRecursive:
      case AcceptRule::kRecursiveWithoutReplacement:
        return recursive();
      case AcceptRule::kKSeq:
        return k_seq();
      case AcceptRule::kTraversal:
      case AcceptRule::kTraversalWithoutReplacement:
        return traversal();
    }
    return {0, -1};
  }

 private:
  // One token is drawn from p as plain decoding draws it; the walk goes on into the nodes that carry it.
  SPECDEC_COMMON_MEMBER Outcome follow() {
    int node = 0;
    for (int depth = 0;; ++depth) {
      if (!rows_.open(node)) return {node, -1};
      const int64_t token = emit(node, depth, rows_.sum(node));
      const int next = rows_.follow(depth + 1, token);
      if (next < 0) return {node, token};
      node = next;
    }
  }

  // SpecInfer (arXiv 2305.09781), Sequoia (arXiv 2402.12374): children one by one; with one child speculative
  // sampling (arXiv 2211.17192, 2302.01318).
  SPECDEC_COMMON_MEMBER Outcome recursive() {
    int node = 0;
    for (int depth = 0;; ++depth) {
      if (!rows_.open(node)) return {node, -1};
      double factor = 1.0, left = 1.0;
      int child = rows_.next_child(node);
      for (; child >= 0 && left > 0.0; child = rows_.next_child(node)) {
        const double scale = draft_scale(child), q = scale * rows_.q(child);
        const double p = factor * rows_.p(node, rows_.token(child));
        if (q > 0.0 && test(depth, rows_.rejected(node)) * q < p) break;
        rows_.reject(child, factor, scale);
        left = rows_.sum(node);
        factor = 1.0 / left;
      }
      if (child < 0 || !(left > 0.0)) return {node, emit(node, depth, left)};
      node = child;
    }
  }

  // SpecTr (arXiv 2310.15141): k children, drawn independently from one row, are tested with
  // min(1, p / (rho q)). Exact for every rho at which the residual is not negative; the least of them lies
  // between 1 and k, and the upper end of a bisection is taken.
  SPECDEC_COMMON_MEMBER Outcome k_seq() {
    constexpr int kBisections = 10;
    int node = 0;
    for (int depth = 0;; ++depth) {
      if (!rows_.open(node)) return {node, -1};
      int children = 0;
      for (int c = rows_.first_child(node); c >= 0; c = rows_.next_sibling(c)) ++children;
      if (children == 0) return {node, emit(node, depth, 1.0)};
      double low = 1.0, rho = children > 1 ? children : 1.0;
      for (int i = 0; i < kBisections && children > 1; ++i) {
        const double middle = 0.5 * (low + rho), overlap = rows_.overlap(node, 1.0 / middle);
        (any_of(children, overlap) <= middle * overlap ? rho : low) = middle;
      }
      int child = rows_.first_child(node);
      for (int rank = 0; child >= 0; child = rows_.next_sibling(child), ++rank) {
        const double q = rho * rows_.q(child);
        if (q > 0.0 && test(depth, rank) * q < rows_.p(node, rows_.token(child))) break;
      }
      if (child < 0) {
        const double inverse = 1.0 / rho, overlap = rows_.overlap(node, inverse);
        rows_.reject_all(node, inverse, overlap > 0.0 ? any_of(children, overlap) / overlap : 0.0);
        return {node, emit(node, depth, rows_.sum(node))};
      }
      node = child;
    }
  }

  // Traversal verification (arXiv 2505.12398), on a chain block verification (arXiv 2403.10444): a leaf is
  // accepted with the clipped joint ratio of its path, its chance. A rejected one leaves at its parent
  // max(chance p - q, 0), of sum S, and the chance S / (S + 1 - chance); then the next child is tried, or the
  // parent, which has become a leaf. The root token is always accepted. Nothing below a chance of zero (a
  // path outside the target's support) can be accepted, and no row is made there, nor of a leaf before it is
  // accepted.
  SPECDEC_COMMON_MEMBER Outcome traversal() {
    int node = 0, depth = 0;
    rows_.keep(0, 1.0, 1.0);
    for (;;) {
      const double chance = rows_.chance(node);
      const int child = node == 0 || chance > 0.0 ? rows_.next_child(node) : -1;
      if (child < 0 && node != 0 && !(uniform(seed_, position_, RandomStream::kRound, node) < chance)) {
        const int parent = rows_.parent(node);
        const double before = rows_.chance(parent), sum = rows_.left(parent);
        rows_.reject(node, sum > 0.0 ? before / sum : 0.0, draft_scale(node));
        const double rest = rows_.sum(parent);
        rows_.keep(parent, rest > 0.0 ? rest / (rest + 1.0 - before) : 0.0, rest);
        node = parent;
        --depth;
        continue;
      }
      if (!rows_.open(node)) return {node, -1};
      const double left = rows_.left(node);
      if (child < 0) return {node, emit(node, depth, left)};
      const double q = draft_scale(child) * rows_.q(child);
      const double p = left > 0.0 ? chance / left * rows_.p(node, rows_.token(child)) : 0.0;
      rows_.keep(child, !(q > 0.0) ? 0.0 : p < q ? p / q : 1.0, 1.0);
      node = child;
      ++depth;
    }
  }

  SPECDEC_COMMON_MEMBER double test(int depth, int rank) const {
    return uniform(seed_, position_ + depth, RandomStream::kAccept, static_cast<uint64_t>(rank));
  }

  // A row without its elder siblings' tokens no longer has the sum 1.
  SPECDEC_COMMON_MEMBER double draft_scale(int child) const {
    if (!rows_.without_replacement() || child == rows_.first_child(rows_.parent(child))) return 1.0;
    const double rest = rows_.q_left(child);
    return rest > 0.0 ? 1.0 / rest : 0.0;
  }

  // 1 - (1 - x)^k
  SPECDEC_COMMON_MEMBER static double any_of(int k, double x) {
    double none = 1.0;
    for (int i = 0; i < k; ++i) none = none * (1.0 - x);
    return 1.0 - none;
  }

  // A token of what is left at the node, whose sum `left` is known if a child was rejected. It vanishes only
  // where p equals q up to rounding; there p is its limit.
  SPECDEC_COMMON_MEMBER int64_t emit(int node, int depth, double left) {
    if (!(left > 0.0)) rows_.restore(node);
    const double total = rows_.rejected(node) > 0 && left > 0.0 ? left : rows_.sum(node);
    return rows_.draw(node, total, uniform(seed_, position_ + depth, RandomStream::kSample, 0));
  }

  Rows& rows_;
  uint64_t seed_;
  int64_t position_;
};

}  // namespace specdec
