// accept_sampled: a team of blocks walks the rules of acceptance_rules.h for one sequence. All threads of all
// blocks make every call together; each block keeps the tree and what is known of its nodes in shared memory,
// written by one thread, and reads its parts of the rows that the walk comes to.
#pragma once

#include "accept_walk.cuh"
#include "sampling_row.cuh"
#include "specdec/acceptance_rules.h"

namespace specdec::cuda {

constexpr int kMaxSampledNodes = 512;  // N; 48 KB of what is known of them

struct AcceptSampledWork {
  AcceptSampledParams op;
  TeamView team;
};

template <typename T, bool kVector>
class SampledRows {
 public:
  using Row = RowSampler<T, kVector>;
  using Lanes = SegmentLanes<kVector>;
  static constexpr int kThreads = Team::kThreads;

  static int64_t shared_bytes(int64_t N, int64_t V) {
    // Arrays of a node each: twelve of four bytes, five of eight, each from a multiple of 16 bytes on.
    return N * (12 * 4 + 5 * 8) + 18 * 16 + Row::shared_bytes(V);
  }

  SPECDEC_DEVICE SampledRows(Team& team, const AcceptSampledParams& p, int64_t b, int length,
                             SharedArena& shared)
      : p_(p),
        b_(b),
        length_(length),
        rule_(static_cast<AcceptRule>(Global<const int32_t>(p.rules).load(b))),
        settings_(p.sampling, b),
        row_(team, p.V, shared) {
    const int64_t N = p.N;
    tokens_ = shared.take<int32_t>(N);
    parents_ = shared.take<int32_t>(N);
    first_children_ = shared.take<int32_t>(N);
    next_siblings_ = shared.take<int32_t>(N);
    draft_rows_ = shared.take<int32_t>(N);
    marks_ = shared.take<int32_t>(N);
    opened_ = shared.take<int32_t>(N);
    rejected_ = shared.take<int32_t>(N);
    left_kind_ = shared.take<int32_t>(N);
    largest_ = shared.take<float>(N);
    inverse_sum_ = shared.take<float>(N);
    last_rank_ = shared.take<uint32_t>(N);
    last_token_ = shared.take<int32_t>(N);
    sum_ = shared.take<double>(N);
    factor_ = shared.take<double>(N);
    scale_ = shared.take<double>(N);
    chance_ = shared.take<double>(N);
    left_ = shared.take<double>(N);
    told_ = shared.take<int32_t>(kThreads / 32);
    read_tree();
  }

  SPECDEC_DEVICE AcceptRule rule() const { return rule_; }

  // --- what acceptance_rules.h asks for ---

  SPECDEC_DEVICE bool without_replacement() const {
    return rule_ == AcceptRule::kRecursiveWithoutReplacement ||
           rule_ == AcceptRule::kTraversalWithoutReplacement;
  }
  SPECDEC_DEVICE int64_t token(int node) const { return tokens_.load(node); }
  SPECDEC_DEVICE int parent(int node) const { return parents_.load(node); }
  SPECDEC_DEVICE int first_child(int node) const { return first_children_.load(node); }
  SPECDEC_DEVICE int next_sibling(int node) const { return next_siblings_.load(node); }

  SPECDEC_DEVICE bool open(int node) {
    const int before = opened_.load(node);
    if (before != kClosed) return before == kOpen;
    RowScale scale;
    double sum = 0.0;
    const bool good = row_.open(logits(node), settings_, scale, sum);
    write([&] {
      opened_.store(node, good ? kOpen : kNoRow);
      largest_.store(node, scale.largest);
      inverse_sum_.store(node, scale.inverse_sum);
      last_rank_.store(node, scale.last_rank);
      last_token_.store(node, static_cast<int32_t>(scale.last_token < INT32_MAX ? scale.last_token : INT32_MAX));
      sum_.store(node, sum);
    });
    summed_ = node, summed_rejected_ = 0, summed_kind_ = kPlain;
    return good;
  }

  SPECDEC_DEVICE int rejected(int node) const { return rejected_.load(node); }
  SPECDEC_DEVICE int next_child(int node) const {
    int child = first_children_.load(node);
    for (int i = rejected_.load(node); i > 0 && child >= 0; --i) child = next_siblings_.load(child);
    return child;
  }
  SPECDEC_DEVICE void reject(int child, double factor, double scale) {
    const int node = parents_.load(child), count = rejected_.load(node) + 1;
    write([&] {
      factor_.store(child, factor);
      scale_.store(child, scale);
      rejected_.store(node, count);
      left_kind_.store(node, kResidual);
    });
  }
  SPECDEC_DEVICE void reject_all(int node, double inverse, double share) {
    write([&] {
      factor_.store(node, inverse);
      scale_.store(node, share);
      rejected_.store(node, 1);
      left_kind_.store(node, kSpecTr);
    });
  }
  SPECDEC_DEVICE void restore(int node) {
    write([&] { left_kind_.store(node, kPlain); });
  }

  SPECDEC_DEVICE double p(int node, int64_t token) const {
    if (token < 0) return 0.0;
    const RowScale scale = scale_of(node);
    const double p = static_cast<double>(scale.probability(float_of(logits(node).load(token)), token));
    switch (left_kind_.load(node)) {
      case kResidual: {
        double left = p;
        bool gone = false;
        int child = first_children_.load(node);
        for (int i = rejected_.load(node); i > 0; --i, child = next_siblings_.load(child)) {
          const double q = gone ? 0.0 : q_at(child, token);
          left = residual(factor_.load(child) * left - scale_.load(child) * q);
          gone = gone || (without_replacement() && tokens_.load(child) == token);
        }
        return left;
      }
      case kSpecTr:
        return spec_tr(node, p, q_at(first_children_.load(node), token));
    }
    return p;
  }
  SPECDEC_DEVICE double q(int child) const {
    const int64_t token = tokens_.load(child);
    if (token < 0) return 0.0;
    if (without_replacement()) {
      for (int elder = first_children_.load(parents_.load(child)); elder != child;
           elder = next_siblings_.load(elder)) {
        if (tokens_.load(elder) == token) return 0.0;
      }
    }
    return q_at(child, token);
  }
  SPECDEC_DEVICE double q_left(int child) {
    summed_ = -1;
    if (draft_rows_.load(child) < 0) return 0.0;
    const Global<const float> row = draft_row(child);
    const int eldest = first_children_.load(parents_.load(child));
    return row_.sum([&](int64_t first, double (&e)[4]) {
      float x[4];
      Lanes::load(row, first, p_.V, x);
      for (int k = 0; k < 4; ++k) e[k] = static_cast<double>(x[k]);
      for (int elder = eldest; elder != child; elder = next_siblings_.load(elder)) take_out(elder, first, e);
    });
  }
  SPECDEC_DEVICE double sum(int node) {
    if (left_kind_.load(node) == kPlain) return sum_.load(node);
    return make_sum(node);
  }
  SPECDEC_DEVICE double overlap(int node, double inverse) {
    summed_ = -1;
    const RowScale scale = scale_of(node);
    const Global<const T> row = logits(node);
    return row_.sum([&](int64_t first, double (&e)[4]) {
      float q[4];
      probabilities(row, scale, first, e);
      load_draft(first_children_.load(node), first, q);
      SPECDEC_UNROLL
      for (int k = 0; k < 4; ++k) e[k] = smaller(static_cast<double>(q[k]), inverse * e[k]);
    });
  }
  SPECDEC_DEVICE int64_t draw(int node, double total, double u) {
    const int kind = left_kind_.load(node);
    if (summed_ != node || summed_kind_ != kind || summed_rejected_ != rejected_.load(node)) make_sum(node);
    const RowScale scale = scale_of(node);
    const Global<const T> row = logits(node);
    return row_.draw([&](int64_t first, double (&e)[4]) { elements(node, kind, row, scale, first, e); },
                     u * total);
  }

  SPECDEC_DEVICE double chance(int node) const { return chance_.load(node); }
  SPECDEC_DEVICE double left(int node) const { return left_.load(node); }
  SPECDEC_DEVICE void keep(int node, double chance, double left) {
    write([&] {
      chance_.store(node, chance);
      left_.store(node, left);
    });
  }

  SPECDEC_DEVICE int follow(int depth, int64_t token) {
    int32_t first = INT32_MAX;
    uint32_t marked = 0;  // of the thread's nodes
    static_assert(kMaxSampledNodes / kThreads <= 32);
    for (int n = thread(), i = 0; n < length_; n += kThreads, ++i) {
      const int parent = parents_.load(n);
      if (parent < 0 || marks_.load(parent) != depth - 1 || tokens_.load(n) != token) continue;
      marked |= 1u << i;
      if (n < first) first = n;
    }
    for (int mask = 16; mask > 0; mask /= 2) {
      const int32_t other = shuffle_xor(first, mask);
      if (other < first) first = other;
    }
    if (lane() == 0) told_.store(warp(), first);
    barrier();
    for (int n = thread(); marked != 0; n += kThreads, marked >>= 1) {
      if ((marked & 1u) != 0) marks_.store(n, depth);
    }
    for (int w = 0; w < kThreads / 32; ++w) {
      const int32_t other = told_.load(w);
      if (other < first) first = other;
    }
    barrier();
    return first < INT32_MAX ? first : -1;
  }

 private:
  enum Opened : int32_t { kClosed, kOpen, kNoRow };
  enum Left : int32_t { kPlain, kResidual, kSpecTr };  // what is left of a node's row

  SPECDEC_DEVICE void read_tree() {
    const int64_t at = b_ * p_.N;
    for (int n = thread(); n < length_; n += kThreads) {
      const int64_t token = Global<const int64_t>(p_.draft.tokens).load(at + n);
      tokens_.store(n, token >= 0 && token < p_.V ? static_cast<int32_t>(token) : -1);
      parents_.store(n, draft_parent(p_.draft, b_, p_.N, n));
      int32_t row = -1;
      if (n > 0 && rule_ != AcceptRule::kFollow && p_.draft_probs != nullptr && p_.draft_rows != nullptr)
        row = Global<const int32_t>(p_.draft_rows).load(at + n);
      draft_rows_.store(n, row < p_.R ? row : -1);
      marks_.store(n, n == 0 ? 0 : -1);
      opened_.store(n, kClosed);
      rejected_.store(n, 0);
      left_kind_.store(n, kPlain);
    }
    barrier();
    for (int n = thread(); n < length_; n += kThreads) {
      const int parent = parents_.load(n);
      int child = -1, sibling = -1;
      for (int m = n + 1; m < length_ && (child < 0 || sibling < 0); ++m) {
        const int of = parents_.load(m);
        if (of == n && child < 0) child = m;
        if (of == parent && parent >= 0 && sibling < 0) sibling = m;
      }
      first_children_.store(n, child);
      next_siblings_.store(n, sibling);
    }
    barrier();
  }

  // By one thread, after all have read what was there and before any reads what comes.
  template <typename F>
  SPECDEC_DEVICE void write(const F& f) const {
    barrier();
    if (thread() == 0) f();
    barrier();
  }

  SPECDEC_DEVICE Global<const T> logits(int node) const {
    return Global<const T>(static_cast<const T*>(p_.logits)) + b_ * p_.stride_b + node * p_.stride_n;
  }
  SPECDEC_DEVICE Global<const float> draft_row(int child) const {
    return Global<const float>(p_.draft_probs) + draft_rows_.load(child) * p_.draft_stride;
  }
  SPECDEC_DEVICE RowScale scale_of(int node) const {
    RowScale scale;
    scale.largest = largest_.load(node);
    scale.inverse_t = settings_.inverse_t;
    scale.inverse_sum = inverse_sum_.load(node);
    scale.min_weight = settings_.min_p;
    scale.last_rank = last_rank_.load(node);
    scale.last_token = last_token_.load(node);
    return scale;
  }

  // Of the row that a child was drawn from; zeros where it was drawn from none.
  SPECDEC_DEVICE double q_at(int child, int64_t token) const {
    return draft_rows_.load(child) < 0 ? 0.0 : static_cast<double>(draft_row(child).load(token));
  }
  SPECDEC_DEVICE void load_draft(int child, int64_t first, float (&q)[4]) const {
    if (draft_rows_.load(child) >= 0) return Lanes::load(draft_row(child), first, p_.V, q);
    SPECDEC_UNROLL
    for (int k = 0; k < 4; ++k) q[k] = 0.0f;
  }
  SPECDEC_DEVICE void probabilities(const Global<const T>& row, const RowScale& scale, int64_t first,
                                    double (&e)[4]) const {
    float x[4];
    Lanes::load(row, first, p_.V, x);
    SPECDEC_UNROLL
    for (int k = 0; k < 4; ++k) {
      const int64_t token = first + Lanes::lane_of() + 32 * k;
      e[k] = token < p_.V ? static_cast<double>(scale.probability(x[k], token)) : 0.0;
    }
  }
  // The token of a node gets nothing.
  SPECDEC_DEVICE void take_out(int node, int64_t first, double (&e)[4]) const {
    const int64_t at = tokens_.load(node) - first - Lanes::lane_of();
    SPECDEC_UNROLL
    for (int k = 0; k < 4; ++k) e[k] = at == 32 * k ? 0.0 : e[k];
  }

  SPECDEC_DEVICE static double smaller(double a, double b) { return a < b ? a : b; }
  SPECDEC_DEVICE static double residual(double x) { return x > 0.0 ? x : 0.0; }
  SPECDEC_DEVICE double spec_tr(int node, double p, double q) const {
    return residual(p - scale_.load(node) * smaller(q, factor_.load(node) * p));
  }

  // A lane's elements of what is left of a node's row; weights where that is p.
  SPECDEC_DEVICE void elements(int node, int kind, const Global<const T>& row, const RowScale& scale,
                               int64_t first, double (&e)[4]) const {
    if (kind == kPlain) return row_.weights(row, scale, first, e);
    probabilities(row, scale, first, e);
    float q[4];
    int child = first_children_.load(node);
    if (kind == kSpecTr) {
      load_draft(child, first, q);
      SPECDEC_UNROLL
      for (int k = 0; k < 4; ++k) e[k] = spec_tr(node, e[k], static_cast<double>(q[k]));
      return;
    }
    double of_child[4];
    int loaded = -2;  // the row that of_child comes from
    SPECDEC_ROLL
    for (int i = rejected_.load(node); i > 0; --i, child = next_siblings_.load(child)) {
      if (draft_rows_.load(child) != loaded) {
        loaded = draft_rows_.load(child);
        load_draft(child, first, q);
        SPECDEC_UNROLL
        for (int k = 0; k < 4; ++k) of_child[k] = static_cast<double>(q[k]);
        if (without_replacement()) {
          SPECDEC_ROLL
          for (int elder = first_children_.load(node); elder != child; elder = next_siblings_.load(elder))
            take_out(elder, first, of_child);
        }
      }
      const double factor = factor_.load(child), times = scale_.load(child);
      SPECDEC_UNROLL
      for (int k = 0; k < 4; ++k) e[k] = residual(factor * e[k] - times * of_child[k]);
      if (without_replacement()) take_out(child, first, of_child);
    }
  }
  SPECDEC_DEVICE double make_sum(int node) {
    const int kind = left_kind_.load(node);
    const RowScale scale = scale_of(node);
    const Global<const T> row = logits(node);
    const double sum = row_.sum(
        [&](int64_t first, double (&e)[4]) { elements(node, kind, row, scale, first, e); });
    summed_ = node, summed_rejected_ = rejected_.load(node), summed_kind_ = kind;
    return sum;
  }

  const AcceptSampledParams& p_;
  int64_t b_;
  int length_;
  AcceptRule rule_;
  RowSettings settings_;
  Row row_;
  int summed_ = -1, summed_rejected_ = 0, summed_kind_ = 0;  // whose parts' sums `row_` has
  Shared<int32_t> tokens_, parents_, first_children_, next_siblings_, draft_rows_, marks_, opened_,
      rejected_, left_kind_, last_token_, told_;
  Shared<float> largest_, inverse_sum_;
  Shared<uint32_t> last_rank_;
  // What a rejection of a child makes of its parent's row; of a node itself where SpecTr rejects all.
  Shared<double> sum_, factor_, scale_, chance_, left_;
};

template <typename T, bool kVector>
struct AcceptSampled {
  using Params = AcceptSampledWork;
  using Rows = SampledRows<T, kVector>;
  static constexpr int kThreads = Team::kThreads;

  static Launch shape(const Params& p) {
    const int64_t blocks = p.team.blocks();
    return {{blocks <= INT32_MAX ? static_cast<int32_t>(blocks) : -1, 1, 1},
            Rows::shared_bytes(p.op.N, p.op.V)};
  }

  SPECDEC_DEVICE static void run(const Params& p, SharedArena shared) {
    Team team(p.team, shared);
    const int64_t b = team.index();
    const int length = draft_length(p.op.draft, b, p.op.N);
    if (length == 0) {
      if (team.rank() == 0) finish(p.op, b, 0, 0);
    } else {
      Rows rows(team, p.op, b, length, shared);
      AcceptanceWalk<Rows> walk(rows, Global<const uint64_t>(p.op.seeds).load(b),
                                Global<const int64_t>(p.op.positions).load(b));
      const Outcome outcome = walk.run(rows.rule());
      if (team.rank() == 0) {
        int taken = 1;
        for (int node = outcome.leaf; node > 0; node = rows.parent(node)) ++taken;
        finish(p.op, b, taken, outcome.next_token);
        if (thread() == 0) {
          const Global<int32_t> path = path_of(p.op, b);
          for (int node = outcome.leaf, i = taken - 1; i >= 0; --i, node = rows.parent(node)) path.store(i, node);
        }
      }
    }
    team.leave();
  }

 private:
  SPECDEC_DEVICE static Global<int32_t> path_of(const AcceptSampledParams& p, int64_t b) {
    return Global<int32_t>(p.accepted.path) + b * p.accepted.max_length;
  }
  // All but the path's nodes.
  SPECDEC_DEVICE static void finish(const AcceptSampledParams& p, int64_t b, int taken, int64_t next) {
    const Global<int32_t> path = path_of(p, b);
    for (int64_t i = taken + thread(); i < p.accepted.max_length; i += kThreads) path.store(i, 0);
    if (thread() != 0) return;
    Global<int32_t>(p.accepted.path_lengths).store(b, taken);
    Global<int64_t>(p.accepted.next_token).store(b, next);
  }
};

}  // namespace specdec::cuda
