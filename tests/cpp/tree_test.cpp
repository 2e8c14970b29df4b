// The tree schedule against definitions written out naively.
#include "specdec/tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace specdec {
namespace {

using Parents = std::vector<int32_t>;

TreeSchedule schedule(const Parents& parents) {
  TreeSchedule tree;
  tree.build(parents.data(), static_cast<int64_t>(parents.size()));
  return tree;
}

AncestorMask mask(const TreeSchedule& tree) {
  AncestorMask ancestors;
  ancestors.build(tree.parent, tree.nodes);
  return ancestors;
}

Parents listed_children(const TreeSchedule& tree, int32_t node) {
  return Parents(tree.children_of(node), tree.children_of(node) + tree.child_count(node));
}

std::string error_text(const Parents& parents, int64_t first = 0) {
  char text[96] = "";
  const TreeError error = check_parents(parents.data(), static_cast<int64_t>(parents.size()), first);
  if (!error.ok()) error.format(text, sizeof(text));
  return text;
}

std::set<int32_t> path_to(const Parents& parents, int32_t node) {
  std::set<int32_t> path;
  for (; node >= 0; node = parents[node]) path.insert(node);
  return path;
}

int32_t subtree_size(const Parents& parents, int32_t node) {
  int32_t size = 0;
  for (int32_t i = 0; i < static_cast<int32_t>(parents.size()); ++i) size += path_to(parents, i).count(node);
  return size;
}

std::vector<int32_t> children_of(const Parents& parents, int32_t node) {
  std::vector<int32_t> children;
  for (int32_t i = 0; i < static_cast<int32_t>(parents.size()); ++i)
    if (parents[i] == node) children.push_back(i);
  return children;
}

int32_t heavy_child(const Parents& parents, int32_t node) {
  int32_t best = -1, best_size = 0;
  for (const int32_t child : children_of(parents, node)) {
    if (subtree_size(parents, child) > best_size) best = child, best_size = subtree_size(parents, child);
  }
  return best;
}

void depth_first(const Parents& parents, int32_t node, std::vector<int32_t>& order) {
  const int32_t heavy = node < 0 ? -1 : heavy_child(parents, node);
  if (node >= 0) order.push_back(node);
  for (const int32_t child : children_of(parents, node))
    if (child != heavy) depth_first(parents, child, order);
  if (heavy >= 0) depth_first(parents, heavy, order);
}

void expect_follows_definitions(const Parents& parents) {
  const TreeSchedule tree = schedule(parents);
  const int32_t n = static_cast<int32_t>(parents.size());
  ASSERT_EQ(tree.nodes, n);
  ASSERT_EQ(tree.scheduled, n);
  EXPECT_EQ(listed_children(tree, -1), children_of(parents, -1));
  const AncestorMask ancestors = mask(tree);
  std::vector<int32_t> order;
  depth_first(parents, -1, order);
  EXPECT_EQ(order, Parents(tree.order, tree.order + n));

  for (int32_t i = 0; i < n; ++i) {
    const std::set<int32_t> path = path_to(parents, i);
    const int32_t heavy = heavy_child(parents, i);
    EXPECT_EQ(tree.parent[i], parents[i]);
    EXPECT_EQ(tree.depth[i], static_cast<int32_t>(path.size()) - 1);
    EXPECT_EQ(tree.size[i], subtree_size(parents, i));
    EXPECT_EQ(tree.heavy[i], heavy);
    EXPECT_EQ(listed_children(tree, i), children_of(parents, i));
    EXPECT_EQ(tree.order[tree.position[i]], i);
    for (int32_t j = 0; j < n; ++j)
      EXPECT_EQ(ancestors.is_ancestor_or_self(j, i), path.count(j) == 1) << j << " above " << i;
    int32_t light_edges = 0;
    for (int32_t j = i; j >= 0 && parents[j] >= 0; j = parents[j])
      light_edges += heavy_child(parents, parents[j]) != j;
    EXPECT_EQ(tree.level[i], light_edges);
  }

  // Chains partition the nodes; each starts below its parent chain and runs along heavy children to a leaf.
  std::vector<int32_t> seen;
  for (int32_t c = 0; c < tree.chains; ++c) {
    const int16_t* node = tree.chain_nodes + tree.chain_begin[c];
    const int16_t* end = tree.chain_nodes + tree.chain_begin[c + 1];
    ASSERT_LT(node, end);
    EXPECT_EQ(tree.chain_parent[c], parents[*node]);
    if (parents[*node] >= 0) {
      EXPECT_NE(heavy_child(parents, parents[*node]), *node);
    }
    for (; node < end; ++node) {
      EXPECT_EQ(tree.chain_of[*node], c);
      EXPECT_EQ(heavy_child(parents, *node), node + 1 < end ? node[1] : -1);
      seen.push_back(*node);
    }
  }
  std::sort(seen.begin(), seen.end());
  for (int32_t i = 0; i < n; ++i) ASSERT_EQ(seen[i], i);

  // Waves cover the chains in order, and a chain depends only on earlier waves.
  EXPECT_EQ(tree.wave_begin[0], 0);
  EXPECT_EQ(tree.wave_begin[tree.waves], tree.chains);
  for (int32_t w = 0; w < tree.waves; ++w) {
    ASSERT_LT(tree.wave_begin[w], tree.wave_begin[w + 1]);
    int32_t previous = -1;
    for (int32_t c = tree.wave_begin[w]; c < tree.wave_begin[w + 1]; ++c) {
      const int32_t head = tree.chain_nodes[tree.chain_begin[c]];
      EXPECT_EQ(tree.level[head], w);
      EXPECT_GT(head, previous);
      previous = head;
      if (tree.chain_parent[c] >= 0) {
        EXPECT_LT(tree.chain_of[tree.chain_parent[c]], tree.wave_begin[w]);
      }
    }
  }
}

TEST(TreeSchedule, EmptyAndSingle) {
  const TreeSchedule empty = schedule({});
  EXPECT_EQ(empty.nodes, 0);
  EXPECT_EQ(empty.chains, 0);
  EXPECT_EQ(empty.waves, 0);
  EXPECT_EQ(empty.chain_begin[0], 0);
  expect_follows_definitions({-1});
}

TEST(TreeSchedule, RandomTreesFollowTheDefinitions) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 60; ++trial) {
    const int32_t n = 1 + static_cast<int32_t>(random() % 40);
    const int32_t reach = 1 + static_cast<int32_t>(random() % 12);  // small: long chains; large: bushes
    Parents parents;
    for (int32_t i = 0; i < n; ++i) {
      parents.push_back(std::max<int32_t>(-1, i - 1 - static_cast<int32_t>(random() % reach)));
    }
    SCOPED_TRACE(trial);
    expect_follows_definitions(parents);
  }
}

TEST(TreeSchedule, LargestTrees) {
  Parents chain, star, heap, forest;
  for (int32_t i = 0; i < TreeSchedule::kMaxNodes; ++i) {
    chain.push_back(i - 1);
    star.push_back(i == 0 ? -1 : 0);
    heap.push_back((i + 1) / 2 - 1);
    forest.push_back(-1);
  }
  EXPECT_EQ(schedule(chain).chains, 1);
  EXPECT_EQ(schedule(star).chains, TreeSchedule::kMaxNodes - 1);
  EXPECT_EQ(schedule(star).waves, 2);
  EXPECT_EQ(schedule(forest).waves, 1);
  EXPECT_EQ(schedule(heap).waves, TreeSchedule::kMaxWaves);  // 255 nodes: a full binary tree of 8 levels
  EXPECT_TRUE(mask(schedule(heap)).is_ancestor_or_self(0, 255));
  EXPECT_FALSE(mask(schedule(heap)).is_ancestor_or_self(64, 255));
}

TEST(TreeSchedule, NullParentsAreAChain) {
  TreeSchedule chain;
  chain.build(nullptr, 70);
  Parents parents;
  for (int32_t i = 0; i < 70; ++i) parents.push_back(i - 1);
  EXPECT_EQ(chain.chains, 1);
  EXPECT_EQ(mask(chain).words, 2);
  for (int32_t i = 0; i < 70; ++i) {
    EXPECT_EQ(chain.parent[i], i - 1);
    EXPECT_EQ(chain.depth[i], i);
    EXPECT_EQ(chain.order[i], i);
    for (int32_t j = 0; j < 70; ++j) EXPECT_EQ(mask(chain).is_ancestor_or_self(j, i), j <= i);
  }
}

// A prefix node without new descendants is left out; what remains is scheduled as the tree of those nodes.
TEST(TreeSchedule, PrefixNodesWithoutNewDescendantsAreLeftOut) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 40; ++trial) {
    SCOPED_TRACE(trial);
    const int32_t prefix = 1 + static_cast<int32_t>(random() % 20);
    const int32_t n = prefix + static_cast<int32_t>(random() % 20);
    Parents all;
    for (int32_t i = 0; i < n; ++i) all.push_back(static_cast<int32_t>(random() % (i + 1)) - 1);
    std::set<int32_t> needed;
    for (int32_t i = prefix; i < n; ++i) needed.merge(path_to(all, i));
    Parents name(n, -1), kept;  // of a needed node in the reduced tree
    for (const int32_t i : needed) {
      name[i] = static_cast<int32_t>(kept.size());
      kept.push_back(all[i] < 0 ? -1 : name[all[i]]);
    }
    TreeSchedule tree;
    tree.build(all.data() + prefix, n - prefix, all.data(), prefix);
    const TreeSchedule want = schedule(kept);
    ASSERT_EQ(tree.nodes, n);
    ASSERT_EQ(tree.scheduled, want.nodes);
    ASSERT_EQ(tree.chains, want.chains);
    ASSERT_EQ(tree.waves, want.waves);
    for (int32_t i = 0; i < want.nodes; ++i) {
      EXPECT_EQ(name[tree.order[i]], want.order[i]);
      EXPECT_EQ(name[tree.chain_nodes[i]], want.chain_nodes[i]);
      EXPECT_EQ(name[tree.children[i]], want.children[i]);
    }
    for (int32_t i = 0; i < n; ++i) EXPECT_EQ(tree.size[i] > 0, needed.count(i) == 1);
  }
}

// A schedule is rebuilt in place round after round: nothing of a larger tree may survive.
TEST(TreeSchedule, RebuildingForgetsTheLargerTree) {
  TreeSchedule tree;
  tree.build(nullptr, 200);
  const Parents parents = {-1, 0, 0, 1, -1};
  tree.build(parents.data(), 5);
  EXPECT_EQ(tree.chains, 3);
  EXPECT_EQ(tree.child_count(0), 2);
  EXPECT_EQ(tree.size[0], 4);
  EXPECT_EQ(tree.heavy[3], -1);
  EXPECT_EQ(mask(tree).bits[3], 0b1011u);
}

TEST(CheckParents, FindsTheFirstWrongEntry) {
  EXPECT_EQ(error_text({}), "");
  EXPECT_EQ(error_text({-1, 0, 0, -1}), "");
  EXPECT_EQ(error_text({-1, 0, 2, 9}), "is 2, want -1 (a root) or an earlier node (0 to 1)");
  EXPECT_EQ(error_text({-1, -2}), "is -2, want -1 (a root) or an earlier node (0 to 0)");
  EXPECT_EQ(error_text({0}), "is 0, want -1: the first node is a root");
  const Parents wrong = {-1, 0, 2};
  EXPECT_EQ(check_parents(wrong.data(), 3).node, 2);
}

TEST(CheckParents, CountsPrefixNodes) {
  EXPECT_EQ(error_text({2, 3}, 3), "");
  EXPECT_EQ(error_text({3}, 3), "is 3, want -1 (a root) or an earlier node (0 to 2)");
}

}  // namespace
}  // namespace specdec
