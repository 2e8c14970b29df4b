// Binding of a whole deterministic draft: draft_tree. No more than the levels is here; their choices are
// draft_growth.h's.
#include "../cpu/ops.h"
#include "draft_step.h"
#include "specdec/draft_growth.h"

namespace specdec::binding {

namespace {

constexpr int64_t kRankCount = 3;  // RANKS of drafters/calibration.py

// The children of each row of logits [R, V'] and their probabilities, `count` a row.
struct Children {
  std::vector<int64_t> tokens;
  std::vector<float> probs;
};

Children children_of(const Tensor& logits, int64_t count, const std::vector<float>& scales,
                     const int64_t* vocabulary, int64_t tokens) {
  const int64_t R = logits.size(0);
  Children found{std::vector<int64_t>(R * count), std::vector<float>(R * count)};
  LikeliestParams p;
  p.R = R;
  p.V = logits.size(1);
  p.K = count;
  p.logits = present<float>(logits);
  p.scale = scales.empty() ? nullptr : scales.data();
  p.tokens = found.tokens.data();
  p.probs = found.probs.data();
  check_status(cpu::likeliest(p), "draft_tree");
  if (vocabulary != nullptr) {
    for (int64_t& token : found.tokens) {
      if (token < 0) continue;
      token = vocabulary[token];
      STD_TORCH_CHECK(0 <= token && token < tokens, "vocabulary: got token ", token, ", want 0 to ",
                      tokens - 1);
    }
  }
  return found;
}

// The nodes that were run so far: what a level continues.
struct Run {
  Tensor outputs, mixed, k, u, g;
  std::vector<int32_t> parents;  // [B, nodes]; empty for chains
  int64_t B, nodes;

  void explicit_parents() {
    if (!parents.empty()) return;
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t n = 0; n < nodes; ++n) parents.push_back(static_cast<int32_t>(n - 1));
    }
  }

  // [B, nodes] and [B, added] side by side.
  void append(const int32_t* more, int64_t added) {
    std::vector<int32_t> all;
    all.reserve(B * (nodes + added));
    for (int64_t b = 0; b < B; ++b) {
      all.insert(all.end(), parents.begin() + b * nodes, parents.begin() + (b + 1) * nodes);
      all.insert(all.end(), more + b * added, more + (b + 1) * added);
    }
    parents = std::move(all);
  }
};

Tensor int32_tensor(const std::vector<int32_t>& values, int64_t B, int64_t N) {
  const Tensor t = new_contiguous(Device{}, {B, N}, aoti_torch_dtype_int32());
  std::copy(values.begin(), values.end(), static_cast<int32_t*>(t.mutable_data_ptr()));
  return t;
}

// Runs the wanted nodes of all trees; their logits, one tree's after the other's.
Tensor run_level(std::vector<GrowingTree>& trees, const DrafterArgs& drafter, Run& run, int64_t strategy) {
  const int64_t B = run.B;
  int64_t N = 0;
  for (const GrowingTree& tree : trees) N = std::max<int64_t>(N, tree.wanted().size());
  const Tensor tokens = new_contiguous(Device{}, {B, N}, aoti_torch_dtype_int64());
  int64_t* token = static_cast<int64_t*>(tokens.mutable_data_ptr());
  std::vector<int32_t> parents(B * N, -1), lengths(B);
  bool chain = N == 1 && run.parents.empty(), full = true;
  for (int64_t b = 0; b < B; ++b) {
    GrowingTree& tree = trees[b];
    const auto& wanted = tree.wanted();
    lengths[b] = static_cast<int32_t>(wanted.size());
    full = full && lengths[b] == N;
    for (int64_t n = 0; n < N; ++n) {
      token[b * N + n] = n < lengths[b] ? tree.nodes[wanted[n]].token : 0;
      if (n >= lengths[b]) continue;
      const int64_t column = tree.nodes[tree.nodes[wanted[n]].parent].column;
      parents[b * N + n] = static_cast<int32_t>(column);
      chain = chain && column == run.nodes - 1;
    }
    tree.run(run.nodes);
  }
  OptionalTensor parent_tensor, length_tensor, earlier;
  if (!chain) {
    run.explicit_parents();
    parent_tensor = int32_tensor(parents, B, N);
    earlier = int32_tensor(run.parents, B, run.nodes);
  }
  if (!full) {
    length_tensor = new_contiguous(Device{}, {B}, aoti_torch_dtype_int32());
    std::copy(lengths.begin(), lengths.end(), static_cast<int32_t*>(length_tensor->mutable_data_ptr()));
  }
  const OptionalTensor k = run.k, u = run.u, g = run.g, mixed = run.mixed;
  Tensor logits;
  std::tie(logits, run.outputs, run.mixed, run.k, run.u, run.g) = draft_step(
      tokens, parent_tensor, length_tensor, run.outputs, drafter, {k, u, g, earlier, mixed}, strategy);
  if (!chain) run.append(parents.data(), N);
  run.nodes += N;
  return logits;
}

// Chooses what is expanded next; whether anything is.
bool choose(std::vector<GrowingTree>& trees, const GrowthRules& rules, int64_t room) {
  double gain = 0.0;
  for (GrowingTree& tree : trees) gain += tree.choose();
  bool any = false;
  for (GrowingTree& tree : trees) {
    if (tree.depth() > 0 && tree.priced() && gain < rules.level_price) tree.cut(0);
    if (rules.pruned) tree.cut(room);
    any = any || !tree.wanted().empty();
  }
  return any;
}

// [B, 4] numbers of each request: max_nodes, deepest, the column of its last token, its table of ratios.
const int64_t* requests_of(const Tensor& requests, int64_t B) {
  check_dtype(requests, "requests", ScalarType::Long);
  check_shape(requests, "requests", {B, 4}, "[B, 4]");
  check_contiguous(requests, "requests");
  return present<int64_t>(requests);
}

const double* doubles(const Tensor& t, const char* name, std::initializer_list<int64_t> want,
                      const char* dims) {
  check_dtype(t, name, ScalarType::Double);
  check_shape(t, name, want, dims);
  check_contiguous(t, name);
  return present<double>(t);
}

// Of any size where that is negative.
const int64_t* longs(const Tensor& t, const char* name, int64_t size, const char* dims) {
  check_dtype(t, name, ScalarType::Long);
  check_shape(t, name, {size}, dims);
  check_contiguous(t, name);
  return present<int64_t>(t);
}

// Of all trees: drafts [B + 1] and last the number of levels; tokens, parents and ranks [B, 3, most] and
// chances and probabilities [B, 2, most], -1 and 0 beyond a tree's drafts.
std::tuple<Tensor, Tensor, Tensor> results(const std::vector<GrowingTree>& trees, int64_t levels) {
  const int64_t B = static_cast<int64_t>(trees.size());
  int64_t most = 0;
  for (const GrowingTree& tree : trees) most = std::max(most, tree.drafts());
  const Tensor counts = new_contiguous(Device{}, {B + 1}, aoti_torch_dtype_int64());
  const Tensor nodes = new_contiguous(Device{}, {B, 3, most}, aoti_torch_dtype_int64());
  const Tensor chances = new_contiguous(Device{}, {B, 2, most}, aoti_torch_dtype_float64());
  int64_t* count = static_cast<int64_t*>(counts.mutable_data_ptr());
  int64_t* node = static_cast<int64_t*>(nodes.mutable_data_ptr());
  double* chance = static_cast<double*>(chances.mutable_data_ptr());
  std::fill(node, node + B * 3 * most, -1);
  std::fill(chance, chance + B * 2 * most, 0.0);
  count[B] = levels;
  for (int64_t b = 0; b < B; ++b) {
    count[b] = trees[b].drafts();
    for (int64_t i = 0; i < count[b]; ++i) {
      const GrownNode& grown = trees[b].nodes[i + 1];
      node[(3 * b) * most + i] = grown.token;
      node[(3 * b + 1) * most + i] = grown.parent;
      node[(3 * b + 2) * most + i] = grown.rank;
      chance[(2 * b) * most + i] = grown.chance;
      chance[(2 * b + 1) * most + i] = grown.probability;
    }
  }
  return {counts, nodes, chances};
}

std::tuple<Tensor, Tensor, Tensor> draft_tree(
    Tensor logits, Tensor requests, Tensor prices, OptionalTensor inverse_temperatures, Tensor ratios,
    Tensor edges, double most_chance, double child_chance, double level_price, std::vector<int64_t> branching,
    std::optional<double> tau, int64_t most_run, int64_t most_nodes, Tensor ends, OptionalTensor vocabulary,
    Tensor outputs, Tensor table, OptionalTensor own_norm, OptionalTensor own_weight,
    std::vector<Tensor> weights, OptionalTensor conv_bias, bool gated, double eps, bool neg_eigval,
    Tensor conv_state, Tensor state, OptionalTensor slots, OptionalTensor prefix_k, OptionalTensor prefix_u,
    OptionalTensor prefix_g, OptionalTensor prefix_parents, OptionalTensor prefix_mixed, Tensor norm,
    Tensor head, int64_t vocab, std::optional<double> scale, int64_t strategy) {
  STD_TORCH_CHECK(vocab >= 1, "vocab: got ", vocab, ", want at least 1");
  check_dtype(logits, "logits", ScalarType::Float);
  check_shape(logits, "logits", {-1, vocab}, "[B, V']");
  check_contiguous(logits, "logits");
  const int64_t B = logits.size(0);
  check_shape(outputs, "outputs", {B, -1, -1}, "[B, NP, D]");
  const int64_t* asked = requests_of(requests, B);
  const double* price = doubles(prices, "prices", {B}, "[B]");
  check_shape(ratios, "ratios", {-1, kRankCount, -1}, "[tables, 3, bins]");
  const int64_t tables = ratios.size(0), bins = ratios.size(2);
  STD_TORCH_CHECK(bins >= 1, "ratios: got no bins, want at least 1");
  const double* ratio = doubles(ratios, "ratios", {tables, kRankCount, bins}, "[tables, 3, bins]");
  const double* edge = doubles(edges, "edges", {bins - 1}, "[bins - 1]");
  const float* temperature = nullptr;
  if (inverse_temperatures.has_value()) {
    temperature = float_vector(*inverse_temperatures, "inverse_temperatures", B, "[B]");
  }
  const int64_t* tokens_of_columns =
      vocabulary.has_value() ? longs(*vocabulary, "vocabulary", vocab, "[V']") : nullptr;
  for (const auto* part : {&prefix_k, &prefix_u, &prefix_g, &prefix_mixed}) {
    STD_TORCH_CHECK(part->has_value(), "prefix: got None, want the nodes that drafts continue");
  }
  STD_TORCH_CHECK(!branching.empty() && *std::min_element(branching.begin(), branching.end()) >= 1 &&
                      *std::max_element(branching.begin(), branching.end()) <= kMostLikeliest,
                  "branching: want numbers of children, 1 to ", kMostLikeliest);
  STD_TORCH_CHECK(most_run >= 0, "most_run: got ", most_run, ", want at least 0");
  STD_TORCH_CHECK(most_nodes >= 0, "most_nodes: got ", most_nodes, ", want at least 0");
  check_shape(table, "table", {-1, -1}, "[V, D]");

  GrowthRules rules;
  rules.branching = branching;
  rules.pruned = tau.has_value();
  rules.tau = tau.value_or(0.0);
  rules.most_run = most_run;
  rules.edges.assign(edge, edge + bins - 1);
  rules.most_chance = most_chance;
  rules.child_chance = child_chance;
  rules.level_price = level_price;
  rules.ends = longs(ends, "ends", -1, "[E]");
  rules.end_count = ends.size(0);

  std::vector<GrowingTree> trees;
  for (int64_t b = 0; b < B; ++b) {
    const int64_t* request = asked + 4 * b;
    STD_TORCH_CHECK(request[0] >= 0, "requests: got max_nodes ", request[0], ", want at least 0");
    STD_TORCH_CHECK(request[1] >= 0, "requests: got max_depth ", request[1], ", want at least 0");
    STD_TORCH_CHECK(0 <= request[3] && request[3] < tables, "requests: got table ", request[3],
                    ", want 0 to ", tables - 1);
    STD_TORCH_CHECK(0 <= request[2] && request[2] < outputs.size(1), "requests: got column ", request[2],
                    ", want 0 to ", outputs.size(1) - 1, ", a node of the prefix");
    trees.emplace_back(rules,
                       GrowthRequest{request[0], request[1], price[b] >= 0.0, price[b],
                                     ratio + request[3] * kRankCount * bins, kRankCount},
                       request[2]);
  }
  const DrafterArgs drafter{table,      own_norm, own_weight, weights, conv_bias, gated, eps,  neg_eigval,
                            conv_state, state,    slots,      norm,    head,      vocab, scale};
  Run run{outputs, *prefix_mixed, *prefix_k, *prefix_u, *prefix_g, {}, B, outputs.size(1)};
  if (prefix_parents.has_value()) {
    const int32_t* p = int32_or_null(prefix_parents, "prefix.parents", {B, run.nodes}, "[B, NP]");
    run.parents.assign(p, p + B * run.nodes);
  }
  int64_t levels = 0;
  for (Tensor level = logits; choose(trees, rules, most_nodes - run.nodes); ++levels) {
    if (levels > 0) level = run_level(trees, drafter, run, strategy);
    int64_t count = 0;
    for (GrowingTree& tree : trees) count = std::max(count, tree.ask());
    std::vector<float> scales;
    for (int64_t b = 0; temperature != nullptr && b < B; ++b) {
      scales.insert(scales.end(), trees[b].wanted().size(), temperature[b]);
    }
    const Children found = children_of(level, count, scales, tokens_of_columns, table.size(0));
    int64_t row = 0;
    for (GrowingTree& tree : trees) {
      tree.grow(found.tokens.data() + row * count, found.probs.data() + row * count, count);
      row += static_cast<int64_t>(tree.wanted().size());
    }
  }
  return results(trees, levels);
}

}  // namespace

}  // namespace specdec::binding

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def(
      "draft_tree(Tensor logits, Tensor requests, Tensor prices, Tensor? inverse_temperatures, Tensor "
      "ratios, Tensor edges, float most_chance, float child_chance, float level_price, int[] branching, "
      "float? tau, int most_run, int most_nodes, Tensor ends, Tensor? vocabulary, Tensor outputs, Tensor "
      "table, Tensor? own_norm, Tensor? own_weight, Tensor[] weights, Tensor? conv_bias, bool gated, float "
      "eps, bool neg_eigval, Tensor conv_state, Tensor state, Tensor? slots, Tensor? prefix_k, Tensor? "
      "prefix_u, Tensor? prefix_g, Tensor? prefix_parents, Tensor? prefix_mixed, Tensor norm, Tensor head, "
      "int vocab, float? scale, int strategy) -> (Tensor counts, Tensor nodes, Tensor chances)");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) { m.impl("draft_tree", TORCH_BOX(&specdec::binding::draft_tree)); }
