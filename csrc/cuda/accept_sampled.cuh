// accept_sampled: a team of blocks decides a sequence. In each block a warp walks the rules of
// acceptance_rules.h, all of whose lanes go the same way, and asks for passes over the rows that the walk
// comes to. What is known of the tree lies in shared memory, once a block: all blocks of a team walk alike.
#pragma once

#include "draft_nodes.cuh"
#include "sampling_passes.cuh"
#include "specdec/acceptance_rules.h"

namespace specdec::cuda {

constexpr int kMaxSampledNodes = 512;  // N; 40 KB of what is known of them

struct AcceptSampledWork {
  AcceptSampledParams op;
  TeamView team;
};

// The candidates of a sequence and what is left of the target's rows at them.
struct SampledTree {
  // What is left at a node is p, p less what rejected children took, or what k-SEQ left when it rejected all
  // children.
  enum Left : int32_t { kPlain, kResidual, kKSeq };
  enum Opened : int32_t { kClosed, kOpen, kNoRow };

  static int64_t shared_bytes(int64_t N) { return N * (9 * 4 + 5 * 8) + 14 * 16; }

  SPECDEC_DEVICE SampledTree(const AcceptSampledParams& p, int64_t b, int length, SharedArena& shared)
      : length(length), rule(static_cast<AcceptRule>(Global<const int32_t>(p.rules).load(b))) {
    tokens = shared.take<int32_t>(p.N);
    parents = shared.take<int32_t>(p.N);
    first_children = shared.take<int32_t>(p.N);
    next_siblings = shared.take<int32_t>(p.N);
    draft_rows = shared.take<int32_t>(p.N);
    marks = shared.take<int32_t>(p.N);
    opened = shared.take<int32_t>(p.N);
    rejected = shared.take<int32_t>(p.N);
    left_kind = shared.take<int32_t>(p.N);
    sum = shared.take<double>(p.N);
    factor = shared.take<double>(p.N);
    scale = shared.take<double>(p.N);
    chance = shared.take<double>(p.N);
    left = shared.take<double>(p.N);
    read(p, b);
  }

  SPECDEC_DEVICE bool without_replacement() const {
    return rule == AcceptRule::kRecursiveWithoutReplacement ||
           rule == AcceptRule::kTraversalWithoutReplacement;
  }

  const int length;
  const AcceptRule rule;
  Shared<int32_t> tokens;  // -1 for what is none
  Shared<int32_t> parents, first_children, next_siblings;
  Shared<int32_t> draft_rows;  // negative: drawn from no row
  Shared<int32_t> marks, opened, rejected, left_kind;
  // Of weights; what a child's rejection does to its parent's row, or to a node's own where k-SEQ rejects
  // all of its children; numbers of traversal.
  Shared<double> sum, factor, scale, chance, left;

 private:
  SPECDEC_DEVICE void read(const AcceptSampledParams& p, int64_t b) {
    const bool drawn = rule != AcceptRule::kFollow && p.draft_probs != nullptr && p.draft_rows != nullptr;
    for (int n = thread(); n < length; n += kSamplingThreads) {
      const int64_t token = Global<const int64_t>(p.draft.tokens).load(b * p.N + n);
      const int32_t row = drawn && n > 0 ? Global<const int32_t>(p.draft_rows).load(b * p.N + n) : -1;
      tokens.store(n, token >= 0 && token < p.V ? static_cast<int32_t>(token) : -1);
      parents.store(n, draft_parent(p.draft, b, p.N, n));
      draft_rows.store(n, row < p.R ? row : -1);
      marks.store(n, n == 0 ? 0 : -1);
      opened.store(n, kClosed);
      rejected.store(n, 0);
      left_kind.store(n, kPlain);
    }
    barrier();
    for (int n = thread(); n < length; n += kSamplingThreads) {
      const int parent = parents.load(n);
      int child = -1, sibling = -1;
      for (int m = n + 1; m < length && (child < 0 || (sibling < 0 && parent >= 0)); ++m) {
        const int of = parents.load(m);
        if (of == n && child < 0) child = m;
        if (of == parent && sibling < 0) sibling = m;
      }
      first_children.store(n, child);
      next_siblings.store(n, parent >= 0 ? sibling : -1);
    }
    barrier();
  }
};

// Elements of the rules' own; Command::row is the node.
enum SampledElements : int32_t {
  kLeft = kSourceElements,
  kDraft,    // the row that the child Command::place was drawn from, without the tokens of elder siblings
  kOverlap,  // min(q, Command::number p), q the row of the eldest child
};

// The rows of one sequence.
template <typename T, bool kVector>
class SampledSource {
 public:
  using Lanes = SegmentLanes<kVector>;
  static constexpr bool kScaled = true;

  SPECDEC_DEVICE SampledSource(const AcceptSampledParams& p, int64_t b, const SampledTree& tree)
      : p_(p), b_(b), tree_(tree) {}

  SPECDEC_DEVICE Global<const T> row(int node) const {
    return Global<const T>(static_cast<const T*>(p_.logits)) + b_ * p_.stride_b + node * p_.stride_n;
  }
  template <typename Workers>
  SPECDEC_DEVICE uint64_t pass(const Command&, const RowScale&, Workers&) const {
    return 0;  // none
  }

  SPECDEC_DEVICE float logit(int node, int64_t token) const { return float_of(row(node).load(token)); }
  // Of the row that the child was drawn from; 0 where it was drawn from none.
  SPECDEC_DEVICE double q(int child, int64_t token) const {
    return tree_.draft_rows.load(child) < 0 ? 0.0 : static_cast<double>(draft_row(child).load(token));
  }

  SPECDEC_DEVICE void elements(const Command& command, const RowScale& scale, int64_t first,
                               double (&e)[4]) const {
    const int eldest = tree_.first_children.load(command.row);
    if (command.elements == kDraft) return remaining(command.place, eldest, first, e);
    float x[4];
    Lanes::load(row(command.row), first, p_.V, x);
    SPECDEC_UNROLL
    for (int k = 0; k < 4; ++k) {
      const int64_t token = first + Lanes::lane_of() + 32 * k;
      e[k] = token < p_.V ? static_cast<double>(scale.probability(x[k], token)) : 0.0;
    }
    double q[4];
    if (command.elements == kOverlap || tree_.left_kind.load(command.row) == SampledTree::kKSeq) {
      load_draft(eldest, first, q);
      SPECDEC_UNROLL
      for (int k = 0; k < 4; ++k) {
        e[k] = command.elements == kOverlap ? smaller(q[k], command.number * e[k])
                                            : k_seq_left(tree_, command.row, e[k], q[k]);
      }
      return;
    }
    int child = eldest, loaded = -2;
    SPECDEC_ROLL
    for (int i = tree_.rejected.load(command.row); i > 0; --i, child = tree_.next_siblings.load(child)) {
      if (tree_.draft_rows.load(child) != loaded) {  // siblings share a row, most often
        loaded = tree_.draft_rows.load(child);
        remaining(child, eldest, first, q);
      }
      const double factor = tree_.factor.load(child), times = tree_.scale.load(child);
      SPECDEC_UNROLL
      for (int k = 0; k < 4; ++k) e[k] = positive(factor * e[k] - times * q[k]);
      if (tree_.without_replacement()) take_out(child, first, q);
    }
  }

  SPECDEC_DEVICE static double positive(double x) { return x > 0.0 ? x : 0.0; }
  SPECDEC_DEVICE static double k_seq_left(const SampledTree& tree, int node, double p, double q) {
    return positive(p - tree.scale.load(node) * smaller(q, tree.factor.load(node) * p));
  }

 private:
  SPECDEC_DEVICE static double smaller(double a, double b) { return a < b ? a : b; }

  SPECDEC_DEVICE Global<const float> draft_row(int child) const {
    return Global<const float>(p_.draft_probs) + tree_.draft_rows.load(child) * p_.draft_stride;
  }
  SPECDEC_DEVICE void load_draft(int child, int64_t first, double (&q)[4]) const {
    float x[4] = {};
    if (tree_.draft_rows.load(child) >= 0) Lanes::load(draft_row(child), first, p_.V, x);
    SPECDEC_UNROLL
    for (int k = 0; k < 4; ++k) q[k] = static_cast<double>(x[k]);
  }
  // Without the tokens of elder siblings where the rule wants it so.
  SPECDEC_DEVICE void remaining(int child, int eldest, int64_t first, double (&q)[4]) const {
    load_draft(child, first, q);
    if (!tree_.without_replacement()) return;
    SPECDEC_ROLL
    for (int elder = eldest; elder != child; elder = tree_.next_siblings.load(elder))
      take_out(elder, first, q);
  }
  SPECDEC_DEVICE void take_out(int node, int64_t first, double (&q)[4]) const {
    const int64_t at = tree_.tokens.load(node) - first - Lanes::lane_of();
    SPECDEC_UNROLL
    for (int k = 0; k < 4; ++k) q[k] = at == 32 * k ? 0.0 : q[k];
  }

  const AcceptSampledParams& p_;
  int64_t b_;
  const SampledTree& tree_;
};

// What acceptance_rules.h asks for, by the control warp.
template <typename Source>
class SampledRows {
 public:
  SPECDEC_DEVICE SampledRows(const SampledTree& tree, const Source& source, const Mailbox& mailbox,
                             const RowTable& table, int64_t V)
      : tree_(tree), source_(source), mailbox_(mailbox), table_(table), control_(mailbox, table, V) {}

  SPECDEC_DEVICE bool without_replacement() const { return tree_.without_replacement(); }
  SPECDEC_DEVICE int64_t token(int node) const { return tree_.tokens.load(node); }
  SPECDEC_DEVICE int parent(int node) const { return tree_.parents.load(node); }
  SPECDEC_DEVICE int first_child(int node) const { return tree_.first_children.load(node); }
  SPECDEC_DEVICE int next_sibling(int node) const { return tree_.next_siblings.load(node); }
  SPECDEC_DEVICE int rejected(int node) const { return tree_.rejected.load(node); }
  SPECDEC_DEVICE int next_child(int node) const {
    int child = first_child(node);
    for (int i = rejected(node); i > 0 && child >= 0; --i) child = next_sibling(child);
    return child;
  }

  SPECDEC_DEVICE bool open(int node) {
    const int before = tree_.opened.load(node);
    if (before != SampledTree::kClosed) return before == SampledTree::kOpen;
    double sum = 0.0;
    const bool good = control_.open(node, sum);
    write([&] {
      tree_.opened.store(node, good ? SampledTree::kOpen : SampledTree::kNoRow);
      tree_.sum.store(node, sum);
    });
    remember(node);
    return good;
  }

  SPECDEC_DEVICE void reject(int child, double factor, double scale) const {
    const int node = parent(child), count = rejected(node) + 1;
    write([&] {
      tree_.factor.store(child, factor);
      tree_.scale.store(child, scale);
      tree_.rejected.store(node, count);
      tree_.left_kind.store(node, SampledTree::kResidual);
    });
  }
  SPECDEC_DEVICE void reject_all(int node, double inverse, double share) const {
    int count = 0;
    SPECDEC_ROLL
    for (int child = first_child(node); child >= 0; child = next_sibling(child)) ++count;
    write([&] {
      tree_.factor.store(node, inverse);
      tree_.scale.store(node, share);
      tree_.rejected.store(node, count);
      tree_.left_kind.store(node, SampledTree::kKSeq);
    });
  }
  SPECDEC_DEVICE void restore(int node) const {
    write([&] { tree_.left_kind.store(node, SampledTree::kPlain); });
  }

  SPECDEC_DEVICE double p(int node, int64_t token) const {
    if (token < 0) return 0.0;
    double left = static_cast<double>(table_.load(node).probability(source_.logit(node, token), token));
    const int kind = tree_.left_kind.load(node);
    int child = first_child(node);
    if (kind == SampledTree::kKSeq) return Source::k_seq_left(tree_, node, left, source_.q(child, token));
    if (kind == SampledTree::kPlain) return left;
    bool gone = false;
    SPECDEC_ROLL
    for (int i = rejected(node); i > 0; --i, child = next_sibling(child)) {
      const double q = gone ? 0.0 : source_.q(child, token);
      left = Source::positive(tree_.factor.load(child) * left - tree_.scale.load(child) * q);
      gone = gone || (without_replacement() && this->token(child) == token);
    }
    return left;
  }
  SPECDEC_DEVICE double q(int child) const {
    const int64_t token = this->token(child);
    if (token < 0) return 0.0;
    if (without_replacement()) {
      SPECDEC_ROLL
      for (int elder = first_child(parent(child)); elder != child; elder = next_sibling(elder)) {
        if (this->token(elder) == token) return 0.0;
      }
    }
    return source_.q(child, token);
  }

  SPECDEC_DEVICE double q_left(int child) { return make_sum(kDraft, parent(child), child, 0.0); }
  SPECDEC_DEVICE double overlap(int node, double inverse) { return make_sum(kOverlap, node, 0, inverse); }
  SPECDEC_DEVICE double sum(int node) {
    if (tree_.left_kind.load(node) == SampledTree::kPlain) return tree_.sum.load(node);
    return sum_again(node);
  }
  SPECDEC_DEVICE int64_t draw(int node, double total, double u) {
    if (summed_ != node || summed_kind_ != tree_.left_kind.load(node) || summed_rejected_ != rejected(node))
      sum_again(node);
    Command command;
    command.pass = Pass::kDraw;
    command.elements = elements_of(node);
    command.row = node;
    command.number = u * total;
    return static_cast<int64_t>(mailbox_.run(command));
  }

  SPECDEC_DEVICE double chance(int node) const { return tree_.chance.load(node); }
  SPECDEC_DEVICE double left(int node) const { return tree_.left.load(node); }
  SPECDEC_DEVICE void keep(int node, double chance, double left) const {
    write([&] {
      tree_.chance.store(node, chance);
      tree_.left.store(node, left);
    });
  }

  SPECDEC_DEVICE int follow(int depth, int64_t token) const {
    int32_t first = INT32_MAX;
    uint32_t marked = 0;  // of the lane's nodes
    static_assert(kMaxSampledNodes / 32 <= 32);
    for (int n = lane(), i = 0; n < tree_.length; n += 32, ++i) {
      const int parent = tree_.parents.load(n);
      if (parent < 0 || tree_.marks.load(parent) != depth - 1 || tree_.tokens.load(n) != token) continue;
      marked |= 1u << i;
      if (n < first) first = n;
    }
    warp_barrier();
    for (int n = lane(); marked != 0; n += 32, marked >>= 1) {
      if ((marked & 1u) != 0) tree_.marks.store(n, depth);
    }
    warp_barrier();
    for (int mask = 16; mask > 0; mask /= 2) {
      const int32_t other = shuffle_xor(first, mask);
      if (other < first) first = other;
    }
    return first < INT32_MAX ? first : -1;
  }

 private:
  // By one lane, after all have read what was there and before any reads what comes.
  template <typename F>
  SPECDEC_DEVICE void write(const F& f) const {
    warp_barrier();
    if (lane() == 0) f();
    warp_barrier();
  }

  SPECDEC_DEVICE int elements_of(int node) const {
    return tree_.left_kind.load(node) == SampledTree::kPlain ? static_cast<int>(kWeights)
                                                             : static_cast<int>(kLeft);
  }
  SPECDEC_DEVICE double make_sum(int elements, int row, int place, double number) {
    Command command;
    command.pass = Pass::kSum;
    command.elements = elements;
    command.row = row;
    command.place = place;
    command.number = number;
    summed_ = -1;
    return double_of(mailbox_.run(command));
  }
  SPECDEC_DEVICE double sum_again(int node) {
    const double sum = make_sum(elements_of(node), node, 0, 0.0);
    remember(node);
    return sum;
  }
  // What the sums of the parts are of.
  SPECDEC_DEVICE void remember(int node) {
    summed_ = node;
    summed_kind_ = tree_.left_kind.load(node);
    summed_rejected_ = rejected(node);
  }

  const SampledTree& tree_;
  const Source& source_;
  const Mailbox& mailbox_;
  const RowTable& table_;
  RowControl control_;
  int summed_ = -1, summed_kind_ = 0, summed_rejected_ = 0;
};

template <typename T, bool kVector>
struct AcceptSampled {
  using Params = AcceptSampledWork;
  using Source = SampledSource<T, kVector>;
  using Workers = RowWorkers<T, kVector, Source>;
  static constexpr int kThreads = kSamplingThreads;

  static Launch shape(const Params& p) {
    Launch launch = team_launch<Workers>(p.team, p.op.N, p.op.V);
    launch.shared_bytes += SampledTree::shared_bytes(p.op.N);
    return launch;
  }

  SPECDEC_DEVICE static void run(const Params& p, SharedArena shared) {
    Team team(p.team, shared);
    const int64_t b = team.index();
    const int length = draft_length(p.op.draft, b, p.op.N);
    if (length > 0) {
      decide(p.op, team, b, length, shared);
    } else if (team.rank() == 0 && !is_worker()) {
      tell(p.op, b, 0, 0);
    }
    team.leave();
  }

 private:
  SPECDEC_DEVICE static void decide(const AcceptSampledParams& p, Team& team, int64_t b, int length,
                                    SharedArena& shared) {
    const Mailbox mailbox(shared);
    const SampledTree tree(p, b, length, shared);
    const RowTable table(RowSettings(p.sampling, b), p.N, shared);
    const Source source(p, b, tree);
    if (is_worker()) {
      Workers(team, mailbox, table, source, p.V, shared).work();
      return;
    }
    SampledRows<Source> rows(tree, source, mailbox, table, p.V);
    const Outcome outcome = AcceptanceWalk<SampledRows<Source>>(rows, Global<const uint64_t>(p.seeds).load(b),
                                                                Global<const int64_t>(p.positions).load(b))
                                .run(tree.rule);
    mailbox.run({});
    if (team.rank() != 0) return;
    int taken = 1;
    for (int node = outcome.leaf; node > 0; node = tree.parents.load(node)) ++taken;
    tell(p, b, taken, outcome.next_token);
    if (lane() != 0) return;
    const Global<int32_t> path = path_of(p, b);
    for (int node = outcome.leaf, i = taken - 1; i >= 0; --i) {
      path.store(i, node);
      if (node > 0) node = tree.parents.load(node);
    }
  }

  SPECDEC_DEVICE static Global<int32_t> path_of(const AcceptSampledParams& p, int64_t b) {
    return Global<int32_t>(p.accepted.path) + b * p.accepted.max_length;
  }
  // By the control warp: what was decided, but for the path's nodes.
  SPECDEC_DEVICE static void tell(const AcceptSampledParams& p, int64_t b, int taken, int64_t next) {
    const Global<int32_t> path = path_of(p, b);
    for (int64_t i = taken + lane(); i < p.accepted.max_length; i += 32) path.store(i, 0);
    if (lane() != 0) return;
    Global<int32_t>(p.accepted.path_lengths).store(b, taken);
    Global<int64_t>(p.accepted.next_token).store(b, next);
  }
};

}  // namespace specdec::cuda
