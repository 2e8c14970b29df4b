#include "verify_plan.h"

namespace specdec::cpu {

namespace {

// A chain needs no schedule: one pass over the durable state with all prefix nodes, then one a token, in
// place.
void plan_chain(int nodes, int prefix, VerifyPlan* plan) {
  const auto replayed = static_cast<int16_t>(nodes > 0 ? prefix : 0);
  for (int i = 0; i < replayed + nodes - 1; ++i) plan->factors[i] = static_cast<int16_t>(i);
  for (int i = 0; i < nodes; ++i) plan->children[i] = static_cast<int16_t>(prefix + i);
  plan->factors_count = nodes > 0 ? replayed + nodes - 1 : 0;
  plan->steps_count = nodes > 0 ? nodes : 1;
  plan->slots = 0;
  int16_t source = VerifyPlan::kDurable;
  for (int i = 0; i < plan->steps_count; ++i) {
    PlanStep& step = plan->steps[i];
    step.source = source;
    step.first_factor = static_cast<int16_t>(i == 0 ? 0 : replayed + i - 1);
    step.factors = i == 0 ? replayed : int16_t{1};
    step.first_child = static_cast<int16_t>(i);
    step.children = static_cast<int16_t>(i < nodes);
    step.target = VerifyPlan::kNowhere;
    if (step.factors > 0 && i + 1 < nodes) {  // the last node answers, nobody reads its state
      source = step.target = 0;
      plan->slots = 1;
    }
  }
}

// Slots of a tile, the lowest free one first.
class Slots {
 public:
  int16_t acquire() {
    const int slot = __builtin_ctzll(free_);
    free_ &= free_ - 1;
    if (slot >= most_) most_ = slot + 1;
    return static_cast<int16_t>(slot);
  }
  void release(int16_t slot) { free_ |= uint64_t{1} << slot; }
  int most() const { return most_; }

 private:
  static_assert(kMaxSerialNodes <= 64);
  uint64_t free_ = ~uint64_t{0};
  int most_ = 0;
};

// One pass for the durable state and for every node with children, in the order of `walk`.
void plan_tree(const TreeSchedule& tree, const int16_t* walk, VerifyPlan* plan) {
  // Of the durable state at 0, of node i at i + 1: passes that still read the state, and where it is kept.
  int16_t readers[kMaxSerialNodes + 1] = {};
  int16_t kept_in[kMaxSerialNodes + 1];
  kept_in[0] = VerifyPlan::kDurable;
  for (int i = 0; i < tree.scheduled; ++i) {
    if (tree.heavy[walk[i]] >= 0) ++readers[tree.parent[walk[i]] + 1];
  }
  Slots slots;
  int factors = 0, answered = 0, steps = 0;
  int16_t node = -1;
  for (int at = 0;;) {
    PlanStep& step = plan->steps[steps++];
    const int above = node < 0 ? 0 : tree.parent[node] + 1;
    step.source = kept_in[above];
    step.first_factor = static_cast<int16_t>(factors);
    if (node >= 0) plan->factors[factors++] = node;
    // Prefix nodes in a row are replayed in the same pass; an only child follows its parent in every walk.
    while (tree.child_count(node) == 1 && tree.children_of(node)[0] < tree.prefix) {
      node = walk[at++];
      plan->factors[factors++] = node;
    }
    step.factors = static_cast<int16_t>(factors - step.first_factor);
    step.first_child = static_cast<int16_t>(answered);
    for (int c = 0; c < tree.child_count(node); ++c) {
      const int16_t child = tree.children_of(node)[c];
      if (child >= tree.prefix) plan->children[answered++] = child;
    }
    step.children = static_cast<int16_t>(answered - step.first_child);

    // The first child is answered while the state is in registers; further children and passes read it again.
    // The last reader of a slot advances it in place.
    const bool read_later = readers[node + 1] > 0;
    const bool last_reader = step.source >= 0 && --readers[above] == 0;
    step.target = VerifyPlan::kNowhere;
    if (step.factors > 0 && (read_later || step.children > 1)) {
      step.target = last_reader ? step.source : slots.acquire();
      if (!read_later) slots.release(step.target);
    } else if (last_reader) {
      slots.release(step.source);
    }
    kept_in[node + 1] = step.target >= 0 ? step.target : step.source;

    while (at < tree.scheduled && tree.heavy[walk[at]] < 0) ++at;  // leaves are answered by their parents
    if (at == tree.scheduled) break;
    node = walk[at++];
  }
  plan->steps_count = steps;
  plan->factors_count = factors;
  plan->slots = slots.most();
}

}  // namespace

void plan_verify(Strategy strategy, const int32_t* parents, int nodes, const int32_t* prefix_parents,
                 int prefix, VerifyPlan* plan) {
  if (parents == nullptr && prefix_parents == nullptr) {
    plan_chain(nodes, prefix, plan);
    return;
  }
  TreeSchedule tree;
  tree.build(parents, nodes, prefix_parents, prefix);
  plan_tree(tree, strategy == Strategy::kHybrid ? tree.chain_nodes : tree.order, plan);
}

}  // namespace specdec::cpu
