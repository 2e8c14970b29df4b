#include "verify_plan.h"

namespace specdec::cpu {

namespace {

constexpr int kNodes = kMaxSerialNodes;
constexpr int16_t kNone = -1;

// Children of every needed node, the smallest subtree first. Index 0 stands for the durable state, node i has
// index i + 1.
struct Children {
  int16_t first[kNodes + 1];
  int16_t next[kNodes + 1];
  int16_t count[kNodes + 1];
};

class Planner {
 public:
  Planner(const int32_t* parents, int nodes, const int32_t* prefix_parents, int prefix, VerifyPlan* plan)
      : prefix_(prefix), plan_(*plan) {
    plan_.steps_count = 0;
    plan_.slots = 0;
    link(parents, nodes, prefix_parents);
  }

  void serial() { visit(0, VerifyPlan::kDurable, false); }

  // Chain starts wait in a queue: a wave is what the wave before appended.
  void hybrid() {
    struct Start {
      int16_t node, source;
      bool last;  // nobody else starts from this boundary state
    };
    Start queue[kNodes + 1];
    int head = 0, tail = 0;
    queue[tail++] = {0, VerifyPlan::kDurable, false};
    while (head < tail) {
      auto [node, source, reuse] = queue[head++];
      for (;;) {
        const PlanStep& step = emit(&node, source, reuse);
        const int16_t state = step.target >= 0 ? step.target : step.source;
        const int inner = inner_children(node);
        if (inner == 0) {
          finish(step, reuse);
          break;
        }
        int16_t heavy = kNone;
        int seen = 0;
        for (int16_t c = children_.first[node]; c != kNone; c = children_.next[c]) {
          if (children_.count[c] == 0) continue;
          if (++seen == inner) {
            heavy = c;
          } else {
            queue[tail++] = {c, state, seen == inner - 1};
          }
        }
        // The heavy child may advance in place where no light chain waits for this state.
        node = heavy;
        source = state;
        reuse = inner == 1 && state >= 0;
      }
    }
  }

 private:
  void link(const int32_t* parents, int nodes, const int32_t* prefix_parents) {
    const int all = prefix_ + nodes;
    int16_t parent[kNodes];
    for (int i = 0; i < all; ++i) {
      const int32_t* given = i < prefix_ ? prefix_parents : parents;
      parent[i] = static_cast<int16_t>(given != nullptr ? given[i < prefix_ ? i : i - prefix_] : i - 1);
    }
    // Subtree sizes, in new nodes: a prefix node without new descendants is not needed.
    int16_t size[kNodes];
    for (int i = 0; i < all; ++i) size[i] = i < prefix_ ? 0 : 1;
    for (int i = all - 1; i >= 0; --i) {
      if (parent[i] >= 0) size[parent[i]] = static_cast<int16_t>(size[parent[i]] + size[i]);
    }
    for (int i = 0; i <= all; ++i) {
      children_.first[i] = kNone;
      children_.count[i] = 0;
    }
    for (int i = 0; i < all; ++i) {
      if (size[i] == 0) continue;
      int16_t* at = &children_.first[parent[i] + 1];
      while (*at != kNone && size[*at - 1] < size[i]) at = &children_.next[*at];
      children_.next[i + 1] = *at;
      *at = static_cast<int16_t>(i + 1);
      ++children_.count[parent[i] + 1];
    }
  }

  bool is_prefix(int16_t node) const { return node <= prefix_ && node > 0; }

  // Children that a later pass starts from.
  int inner_children(int16_t node) const {
    int inner = 0;
    for (int16_t c = children_.first[node]; c != kNone; c = children_.next[c])
      inner += children_.count[c] > 0;
    return inner;
  }

  // One pass that ends in the state of *node. Prefix nodes in a row are replayed in the same pass: *node
  // moves to the last of them.
  const PlanStep& emit(int16_t* node, int16_t source, bool reuse) {
    PlanStep& step = plan_.steps[plan_.steps_count++];
    step.source = source;
    step.first_factor = static_cast<int16_t>(factors_);
    if (*node > 0) plan_.factors[factors_++] = static_cast<int16_t>(*node - 1);
    while (children_.count[*node] == 1 && is_prefix(children_.first[*node])) {
      *node = children_.first[*node];
      plan_.factors[factors_++] = static_cast<int16_t>(*node - 1);
    }
    step.factors = static_cast<int16_t>(factors_ - step.first_factor);
    step.first_child = static_cast<int16_t>(answered_);
    for (int16_t c = children_.first[*node]; c != kNone; c = children_.next[c]) {
      if (!is_prefix(c)) plan_.children[answered_++] = static_cast<int16_t>(c - 1);
    }
    step.children = static_cast<int16_t>(answered_ - step.first_child);
    // The first child is answered while the state is in registers; further children and passes read it again.
    const bool read_again = inner_children(*node) > 0 || step.children > 1;
    step.target = VerifyPlan::kNowhere;
    if (step.factors > 0 && read_again) step.target = reuse && source >= 0 ? source : acquire();
    return step;
  }

  void visit(int16_t node, int16_t source, bool reuse) {
    for (;;) {
      const PlanStep& step = emit(&node, source, reuse);
      const int16_t state = step.target >= 0 ? step.target : step.source;
      const bool own = step.target >= 0;
      const int inner = inner_children(node);
      if (inner == 0) {
        finish(step, reuse);
        return;
      }
      int seen = 0;
      for (int16_t c = children_.first[node]; c != kNone; c = children_.next[c]) {
        if (children_.count[c] == 0) continue;
        if (++seen < inner) {
          visit(c, state, false);
        } else {
          node = c;
        }
      }
      source = state;
      reuse = own;
    }
  }

  // Nothing starts from the state of this pass.
  void finish(const PlanStep& step, bool reuse) {
    if (step.target >= 0) {
      release(step.target);
    } else if (reuse && step.source >= 0) {
      release(step.source);
    }
  }

  int16_t acquire() {
    int16_t slot = 0;
    while (used_[slot]) ++slot;
    used_[slot] = true;
    if (slot >= plan_.slots) plan_.slots = slot + 1;
    return slot;
  }
  void release(int16_t slot) { used_[slot] = false; }

  int prefix_;
  VerifyPlan& plan_;
  Children children_;
  bool used_[kNodes + 1] = {};
  int factors_ = 0;
  int answered_ = 0;
};

}  // namespace

void plan_verify(Strategy strategy, const int32_t* parents, int nodes, const int32_t* prefix_parents,
                 int prefix, VerifyPlan* plan) {
  Planner planner(parents, nodes, prefix_parents, prefix, plan);
  if (strategy == Strategy::kHybrid) {
    planner.hybrid();
  } else {
    planner.serial();
  }
}

}  // namespace specdec::cpu
