// A tree's schedule (specdec/tree.h) as passes over a tile of the state, and which states have to be kept.
#pragma once

#include <cstdint>

#include "specdec/tree.h"

namespace specdec::cpu {

// One pass over the tile: read a state, apply factors, answer the probes of the children, keep the result
// where a later pass needs it.
struct PlanStep {
  int16_t source;        // tile slot, or VerifyPlan::kDurable
  int16_t target;        // tile slot (may be the source), or VerifyPlan::kNowhere
  int16_t first_factor;  // range of VerifyPlan::factors
  int16_t factors;
  int16_t first_child;  // range of VerifyPlan::children
  int16_t children;
};

// Node ids run over the prefix first, as in VerifyParams.
struct VerifyPlan {
  static constexpr int16_t kDurable = -1;  // the sequence's durable state
  static constexpr int16_t kNowhere = -2;

  int steps_count = 0;
  int slots = 0;  // tile slots in use
  int factors_count = 0;
  PlanStep steps[kMaxSerialNodes + 1];
  int16_t factors[kMaxSerialNodes];   // nodes whose factors are applied, each at most once
  int16_t children[kMaxSerialNodes];  // new nodes, each exactly once
};

// Step 0 is always the pass over the durable state. `parents` [nodes] and `prefix_parents` [prefix] may be
// null (chains). Serial follows the order of the tree's schedule, depth first and the largest subtree last,
// so at most log2(nodes + 1) slots are in use. Hybrid follows its chains, wave by wave: a chain leaves its
// boundary states in slots, the chains that start there follow in the next wave.
void plan_verify(Strategy strategy, const int32_t* parents, int nodes, const int32_t* prefix_parents,
                 int prefix, VerifyPlan* plan);

}  // namespace specdec::cpu
