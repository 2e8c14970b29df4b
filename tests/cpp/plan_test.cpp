// The passes of serial and hybrid verification, carried out on paths in place of states.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "verify_plan.h"

namespace specdec::cpu {
namespace {

using Nodes = std::vector<int32_t>;

Nodes path_to(const Nodes& parents, int32_t node) {
  Nodes path;
  for (; node >= 0; node = parents[node]) path.insert(path.begin(), node);
  return path;
}

// Runs the plan with the path to a node for its state: every new node has to be answered once, from the state
// of its parent.
void expect_answers(const Nodes& parents, int prefix, const VerifyPlan& plan) {
  std::vector<Nodes> slots(plan.slots);
  std::vector<int> answers(parents.size());
  for (int i = 0; i < plan.steps_count; ++i) {
    const PlanStep& step = plan.steps[i];
    ASSERT_EQ(step.source == VerifyPlan::kDurable || (step.source >= 0 && step.source < plan.slots), true);
    Nodes state = step.source >= 0 ? slots[step.source] : Nodes{};
    for (int f = 0; f < step.factors; ++f) state.push_back(plan.factors[step.first_factor + f]);
    if (step.target >= 0) {
      ASSERT_LT(step.target, plan.slots);
      slots[step.target] = state;
    } else {
      EXPECT_LE(step.children, step.factors > 0 ? 1 : kMaxSerialNodes) << "read from registers";
    }
    for (int c = 0; c < step.children; ++c) {
      const int child = plan.children[step.first_child + c];
      ++answers[child];
      EXPECT_EQ(state, path_to(parents, parents[child])) << "node " << child;
    }
  }
  EXPECT_EQ(plan.steps[0].source, VerifyPlan::kDurable);
  for (size_t i = 0; i < parents.size(); ++i) EXPECT_EQ(answers[i], static_cast<int>(i) >= prefix ? 1 : 0);
}

void expect_plans(const Nodes& parents, int prefix, bool null_parents) {
  const int nodes = static_cast<int>(parents.size()) - prefix;
  for (const Strategy strategy : {Strategy::kSerial, Strategy::kHybrid}) {
    VerifyPlan plan;
    plan_verify(strategy, null_parents ? nullptr : parents.data() + prefix, nodes,
                null_parents || prefix == 0 ? nullptr : parents.data(), prefix, &plan);
    expect_answers(parents, prefix, plan);
    if (strategy == Strategy::kSerial) {
      EXPECT_LT(1 << plan.slots, 2 * (static_cast<int>(parents.size()) + 1)) << "more than log2(nodes + 1)";
    }
  }
}

TEST(VerifyPlan, RandomForestsAnswerEveryNodeOnce) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 300; ++trial) {
    SCOPED_TRACE(trial);
    const int all = 1 + static_cast<int>(random() % kMaxSerialNodes);
    const int prefix = trial % 2 == 0 ? 0 : static_cast<int>(random() % all);
    const int reach = 1 + static_cast<int>(random() % 12);
    Nodes parents;
    for (int i = 0; i < all; ++i) {
      parents.push_back(std::max(-1, i - 1 - static_cast<int>(random() % reach)));
    }
    expect_plans(parents, prefix, false);
  }
}

// Without parents nothing is scheduled, and the passes are the same.
TEST(VerifyPlan, ChainsHaveThePassesOfTheirTrees) {
  for (const int nodes : {1, 2, 3, 9, 60}) {
    for (const int prefix : {0, 1, 4}) {
      SCOPED_TRACE(testing::Message() << nodes << " nodes after " << prefix);
      Nodes parents;
      for (int i = 0; i < prefix + nodes; ++i) parents.push_back(i - 1);
      expect_plans(parents, prefix, true);
      VerifyPlan chain, tree;
      plan_verify(Strategy::kSerial, nullptr, nodes, nullptr, prefix, &chain);
      plan_verify(Strategy::kSerial, parents.data() + prefix, nodes, nullptr, prefix, &tree);
      ASSERT_EQ(chain.steps_count, tree.steps_count);
      EXPECT_EQ(chain.slots, tree.slots);
      for (int i = 0; i < chain.steps_count; ++i) {
        EXPECT_EQ(chain.steps[i].source, tree.steps[i].source);
        EXPECT_EQ(chain.steps[i].target, tree.steps[i].target);
        EXPECT_EQ(chain.steps[i].factors, tree.steps[i].factors);
      }
    }
  }
}

// Pending factors are folded into the durable state even where nothing is verified.
TEST(VerifyPlan, NoNodesIsOnePass) {
  for (const int prefix : {0, 3}) {
    VerifyPlan plan;
    plan_verify(Strategy::kSerial, nullptr, 0, nullptr, prefix, &plan);
    ASSERT_EQ(plan.steps_count, 1);
    EXPECT_EQ(plan.slots, 0);
    EXPECT_EQ(plan.steps[0].factors, 0);
    EXPECT_EQ(plan.steps[0].children, 0);
  }
}

}  // namespace
}  // namespace specdec::cpu
