// Binding of a whole draft: draft_tree. No more than the levels is here; their choices are draft_growth.h's.
#include <algorithm>
#include <cstring>

#include "draft_children.h"
#include "draft_step.h"
#include "specdec/draft_growth.h"

namespace specdec::binding {

namespace {

constexpr int64_t kRankCount = 3;  // RANKS of drafters/calibration.py
constexpr int64_t kPlanes = 5;     // integers of a node that are handed out

// The nodes that were run so far: what a level continues.
struct Run {
  Tensor outputs;
  std::vector<Tensor> entries;
  std::vector<int32_t> parents;  // [B, nodes]; empty for chains
  int64_t B, nodes;

  void explicit_parents() {
    if (!parents.empty()) return;
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t n = 0; n < nodes; ++n) parents.push_back(static_cast<int32_t>(n - 1));
    }
  }

  // What an operator gives back is none of its inputs.
  void own() {
    outputs = torch::stable::clone(outputs);
    for (Tensor& part : entries) part = torch::stable::clone(part);
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
  DraftStep step = draft_step(tokens, parent_tensor, length_tensor, drafter,
                              {run.outputs, run.entries, earlier}, strategy);
  run.outputs = step.outputs;
  run.entries = std::move(step.entries);
  if (!chain) run.append(parents.data(), N);
  run.nodes += N;
  return step.logits;
}

// Of logits [B, V'] those of the trees that want children.
Tensor wanted_rows(const std::vector<GrowingTree>& trees, const Tensor& logits) {
  int64_t count = 0;
  for (const GrowingTree& tree : trees) count += static_cast<int64_t>(tree.wanted().size());
  if (count == static_cast<int64_t>(trees.size())) return logits;
  const int64_t V = logits.size(1);
  const Tensor rows = new_contiguous(Device{}, {count, V}, aoti_torch_dtype_float32());
  float* to = static_cast<float*>(rows.mutable_data_ptr());
  const float* from = present<float>(logits);
  for (size_t b = 0; b < trees.size(); ++b, from += V) {
    if (trees[b].wanted().empty()) continue;
    std::memcpy(to, from, V * sizeof(float));
    to += V;
  }
  return rows;
}

// Children of a level's nodes, `count` each; `scales` [B] of the sequences, or null.
Children likeliest_level(const std::vector<GrowingTree>& trees, const Tensor& logits, int64_t count,
                         const float* scales, const DraftVocabulary& vocabulary) {
  std::vector<float> of_rows;
  for (size_t b = 0; scales != nullptr && b < trees.size(); ++b) {
    of_rows.insert(of_rows.end(), trees[b].wanted().size(), scales[b]);
  }
  return likeliest_children(logits, count, of_rows, vocabulary);
}

// One child of each node of a level, drawn; a node's draws are told from others' by its number.
Children drawn_level(const std::vector<GrowingTree>& trees, const Tensor& logits, const Drawing& drawing,
                     const DraftVocabulary& vocabulary) {
  std::vector<int64_t> sequences;
  std::vector<int32_t> nodes;
  for (size_t b = 0; b < trees.size(); ++b) {
    for (int64_t node : trees[b].wanted()) {
      sequences.push_back(static_cast<int64_t>(b));
      nodes.push_back(static_cast<int32_t>(node));
    }
  }
  return drawn_children(logits, sequences, nodes, drawing, vocabulary);
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

// [sum of R, V] of parts [R, V].
Tensor stacked(const std::vector<Tensor>& parts) {
  if (parts.size() == 1) return parts[0];
  int64_t rows = 0, V = 0;
  for (const Tensor& part : parts) rows += part.size(0), V = part.size(1);
  const Tensor all = new_contiguous(Device{}, {rows, V}, aoti_torch_dtype_float32());
  float* to = static_cast<float*>(all.mutable_data_ptr());
  for (const Tensor& part : parts) {
    std::memcpy(to, part.const_data_ptr(), part.numel() * sizeof(float));
    to += part.numel();
  }
  return all;
}

// Of all trees: drafts [B + 1] and last the number of levels; tokens, parents, ranks, columns and rows [B, 5,
// most] and chances and probabilities [B, 2, most], -1 and 0 beyond a tree's drafts.
std::tuple<Tensor, Tensor, Tensor> results(const std::vector<GrowingTree>& trees, int64_t levels) {
  const int64_t B = static_cast<int64_t>(trees.size());
  int64_t most = 0;
  for (const GrowingTree& tree : trees) most = std::max(most, tree.drafts());
  const Tensor counts = new_contiguous(Device{}, {B + 1}, aoti_torch_dtype_int64());
  const Tensor nodes = new_contiguous(Device{}, {B, kPlanes, most}, aoti_torch_dtype_int64());
  const Tensor chances = new_contiguous(Device{}, {B, 2, most}, aoti_torch_dtype_float64());
  int64_t* count = static_cast<int64_t*>(counts.mutable_data_ptr());
  int64_t* node = static_cast<int64_t*>(nodes.mutable_data_ptr());
  double* chance = static_cast<double*>(chances.mutable_data_ptr());
  std::fill(node, node + B * kPlanes * most, -1);
  std::fill(chance, chance + B * 2 * most, 0.0);
  count[B] = levels;
  for (int64_t b = 0; b < B; ++b) {
    count[b] = trees[b].drafts();
    for (int64_t i = 0; i < count[b]; ++i) {
      const GrownNode& grown = trees[b].nodes[i + 1];
      const int64_t planes[kPlanes] = {grown.token, grown.parent, grown.rank, grown.column, grown.row};
      for (int64_t p = 0; p < kPlanes; ++p) node[(kPlanes * b + p) * most + i] = planes[p];
      chance[(2 * b) * most + i] = grown.chance;
      chance[(2 * b + 1) * most + i] = grown.probability;
    }
  }
  return {counts, nodes, chances};
}

// How drawn chains are drawn; without temperatures nothing is.
std::optional<Drawing> drawing_of(const OptionalTensor& temperature, const OptionalTensor& top_k,
                                  const OptionalTensor& top_p, const OptionalTensor& min_p,
                                  const OptionalTensor& seeds, const OptionalTensor& positions, int64_t B) {
  if (!temperature.has_value()) return std::nullopt;
  for (const auto* part : {&top_k, &top_p, &min_p, &seeds, &positions}) {
    STD_TORCH_CHECK(part->has_value(), "sampling: got temperatures without the rest, want all or none");
  }
  return Drawing{
      {float_vector(*temperature, "sampling.temperature", B, "[B]"),
       int32_or_null(top_k, "sampling.top_k", {B}, "[B]"), float_vector(*top_p, "sampling.top_p", B, "[B]"),
       float_vector(*min_p, "sampling.min_p", B, "[B]")},
      reinterpret_cast<const uint64_t*>(longs(*seeds, "sampling.seeds", B, "[B]")),
      longs(*positions, "sampling.positions", B, "[B]")};
}

// counts, nodes and chances as `results` has them; probs [R, V] that were drawn from, [0, 0] where none was;
// parents [B, NP + run] of all nodes that were run, [B, 0] for chains; their outputs and entries.
using DraftResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, std::vector<Tensor>>;

DraftResult draft_tree(Tensor logits, Tensor requests, Tensor prices, OptionalTensor thresholds,
                       OptionalTensor inverse_temperatures, OptionalTensor temperature, OptionalTensor top_k,
                       OptionalTensor top_p, OptionalTensor min_p, OptionalTensor seeds,
                       OptionalTensor positions, Tensor ratios, Tensor edges, double most_chance,
                       double child_chance, double level_price, std::vector<int64_t> branching,
                       std::optional<double> tau, int64_t most_run, int64_t most_nodes, Tensor ends,
                       OptionalTensor vocabulary, Tensor outputs, std::vector<Tensor> prefix,
                       OptionalTensor prefix_parents, Tensor table, OptionalTensor own_norm,
                       OptionalTensor own_weight, std::vector<Tensor> weights, std::vector<int64_t> parts,
                       std::vector<Tensor> conv_biases, bool gated, double eps, bool neg_eigval,
                       std::vector<Tensor> conv_states, std::vector<Tensor> states, OptionalTensor slots,
                       std::optional<double> scale, std::vector<Tensor> adapter, double adapter_eps,
                       Tensor norm, Tensor head, int64_t vocab, int64_t strategy) {
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
  const float* scale_of_rows = nullptr;
  if (inverse_temperatures.has_value()) {
    scale_of_rows = float_vector(*inverse_temperatures, "inverse_temperatures", B, "[B]");
  }
  const double* threshold = thresholds.has_value() ? doubles(*thresholds, "thresholds", {B}, "[B]") : nullptr;
  const std::optional<Drawing> drawing = drawing_of(temperature, top_k, top_p, min_p, seeds, positions, B);
  STD_TORCH_CHECK(!branching.empty() && *std::min_element(branching.begin(), branching.end()) >= 1 &&
                      *std::max_element(branching.begin(), branching.end()) <= kMostLikeliest,
                  "branching: want numbers of children, 1 to ", kMostLikeliest);
  STD_TORCH_CHECK(!drawing.has_value() ||
                      (*std::max_element(branching.begin(), branching.end()) == 1 && !tau.has_value()),
                  "sampling: got a shape with siblings, want a chain: drawn trees are grown level by level");
  STD_TORCH_CHECK(most_run >= 0, "most_run: got ", most_run, ", want at least 0");
  STD_TORCH_CHECK(most_nodes >= 0, "most_nodes: got ", most_nodes, ", want at least 0");
  check_shape(table, "table", {-1, -1}, "[V, D]");
  const DraftVocabulary tokens{
      vocabulary.has_value() ? longs(*vocabulary, "vocabulary", vocab, "[V']") : nullptr, vocab,
      table.size(0)};
  STD_TORCH_CHECK(tokens.tokens != nullptr || vocab <= tokens.size, "vocabulary: got None for ", vocab,
                  " columns, want one: the table has ", tokens.size, " tokens");

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
                                     ratio + request[3] * kRankCount * bins, kRankCount,
                                     threshold == nullptr ? 0.0 : threshold[b], drawing.has_value()},
                       request[2]);
  }
  const StackArgs stack{weights,    parts,       conv_biases, gated, eps,
                        neg_eigval, conv_states, states,      slots, scale};
  const DrafterArgs drafter{table, own_norm, own_weight, stack, adapter, adapter_eps, norm, head, vocab};
  Run run{outputs, prefix, {}, B, outputs.size(1)};
  if (prefix_parents.has_value()) {
    const int32_t* p = int32_or_null(prefix_parents, "prefix.parents", {B, run.nodes}, "[B, NP]");
    run.parents.assign(p, p + B * run.nodes);
  }
  std::vector<Tensor> drawn;
  int64_t levels = 0, rows = 0;
  for (Tensor level = logits; choose(trees, rules, most_nodes - run.nodes); ++levels) {
    if (levels > 0)
      level = run_level(trees, drafter, run, strategy);
    else
      level = wanted_rows(trees, logits);
    int64_t count = 0;
    for (GrowingTree& tree : trees) count = std::max(count, tree.ask());
    const Children found = drawing.has_value() ? drawn_level(trees, level, *drawing, tokens)
                                               : likeliest_level(trees, level, count, scale_of_rows, tokens);
    int64_t row = 0;
    for (GrowingTree& tree : trees) {
      tree.grow(found.tokens.data() + row * count, found.probs.data() + row * count,
                found.sure.data() + row * count, count, drawing.has_value() ? rows + row : -1);
      row += static_cast<int64_t>(tree.wanted().size());
    }
    if (drawing.has_value()) drawn.push_back(found.rows);
    rows += row;
  }
  const Tensor probs =
      drawn.empty() ? new_contiguous(Device{}, {0, 0}, aoti_torch_dtype_float32()) : stacked(drawn);
  const auto [counts, nodes, chances] = results(trees, levels);
  if (run.nodes == outputs.size(1)) run.own();
  return {counts,
          nodes,
          chances,
          probs,
          int32_tensor(run.parents, B, run.parents.empty() ? 0 : run.nodes),
          run.outputs,
          run.entries};
}

}  // namespace

}  // namespace specdec::binding

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def(
      "draft_tree(Tensor logits, Tensor requests, Tensor prices, Tensor? thresholds, "
      "Tensor? inverse_temperatures, Tensor? temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p, "
      "Tensor? seeds, Tensor? positions, Tensor ratios, Tensor edges, float most_chance, "
      "float child_chance, float level_price, int[] branching, float? tau, int most_run, int most_nodes, "
      "Tensor ends, Tensor? vocabulary, Tensor outputs, Tensor[] prefix, Tensor? prefix_parents, "
      "Tensor table, Tensor? own_norm, Tensor? own_weight, Tensor[] weights, int[] parts, "
      "Tensor[] conv_biases, bool gated, float eps, bool neg_eigval, Tensor[] conv_states, Tensor[] states, "
      "Tensor? slots, float? scale, Tensor[] adapter, float adapter_eps, Tensor norm, Tensor head, "
      "int vocab, int strategy) -> (Tensor counts, Tensor nodes, Tensor chances, Tensor probs, "
      "Tensor parents, Tensor outputs, Tensor[] entries)");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) { m.impl("draft_tree", TORCH_BOX(&specdec::binding::draft_tree)); }
