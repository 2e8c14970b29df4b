// Binding of a step of blocks that draft: draft_step.
#include "draft_step.h"

#include <cstring>

#include "dense.h"

namespace specdec::binding {

namespace {

int64_t row_bytes(const Tensor& t, int64_t from) {
  int64_t bytes = t.element_size();
  for (int64_t d = from; d < t.dim(); ++d) bytes *= t.size(d);
  return bytes;
}

// [B, NP, ...] and [B, N, ...] as one tensor [B, NP + N, ...]; what is left of a node is contiguous in both.
Tensor append(const Tensor& old, const Tensor& added) {
  int64_t sizes[kMaxDims];
  for (int64_t d = 0; d < added.dim(); ++d) sizes[d] = added.size(d);
  sizes[1] += old.size(1);
  const Tensor all = new_contiguous(Device{}, sizes, added.dim(), aoti_dtype(added));
  const int64_t node = row_bytes(added, 2), item = added.element_size();
  char* to = static_cast<char*>(all.mutable_data_ptr());
  for (int64_t b = 0; b < added.size(0); ++b) {
    for (const Tensor* part : {&old, &added}) {
      const char* from = static_cast<const char*>(part->const_data_ptr()) + b * part->stride(0) * item;
      for (int64_t n = 0; n < part->size(1); ++n, to += node) {
        std::memcpy(to, from + n * part->stride(1) * item, node);
      }
    }
  }
  return all;
}

// Which nodes are there, and what each continues.
struct Nodes {
  const int64_t* tokens;   // [B, N]
  const int32_t* parents;  // [B, N] among the nodes of the prefix; null: N = 1 and the last of them
  const int32_t* lengths;  // [B]; null: N
  int64_t B, N, earlier;

  int64_t length(int64_t b) const { return lengths == nullptr ? N : lengths[b]; }
  int64_t parent(int64_t b, int64_t n) const { return parents == nullptr ? earlier - 1 : parents[b * N + n]; }
};

Nodes nodes_of(const Tensor& tokens, const OptionalTensor& parents, const OptionalTensor& lengths,
               const Tensor& outputs, int64_t vocab) {
  check_dtype(tokens, "tokens", ScalarType::Long);
  check_shape(tokens, "tokens", {-1, -1}, "[B, N]");
  check_contiguous(tokens, "tokens");
  const int64_t B = tokens.size(0), N = tokens.size(1);
  check_shape(outputs, "outputs", {B, -1, -1}, "[B, NP, D]");
  check_contiguous(outputs, "outputs");
  const int64_t earlier = outputs.size(1);
  STD_TORCH_CHECK(earlier > 0, "outputs: got no nodes, want those of the prefix, which a step continues");
  STD_TORCH_CHECK(parents.has_value() || N == 1, "parents: got None for ", N,
                  " nodes a row, want int32 [B, N]: a step is one level, each of whose nodes has its parent "
                  "in the prefix");
  const Nodes nodes{present<int64_t>(tokens),
                    int32_or_null(parents, "parents", {B, N}, "[B, N]"),
                    int32_or_null(lengths, "lengths", {B}, "[B]"),
                    B,
                    N,
                    earlier};
  for (int64_t b = 0; b < B; ++b) {
    const int64_t length = nodes.length(b);
    STD_TORCH_CHECK(0 <= length && length <= N, "lengths: got ", length, ", want 0 to ", N);
    for (int64_t n = 0; n < length; ++n) {
      const int64_t token = nodes.tokens[b * N + n], parent = nodes.parent(b, n);
      STD_TORCH_CHECK(0 <= token && token < vocab, "tokens: got ", token, ", want 0 to ", vocab - 1);
      STD_TORCH_CHECK(0 <= parent && parent < earlier, "parents: got ", parent, " for node ", n,
                      ", want 0 to ", earlier - 1, ", a node of the prefix");
    }
  }
  return nodes;
}

// A row [D] of `from` for each node, found by `index`(b, n); zero where there is no node.
template <typename Index>
Tensor gather(const Nodes& nodes, const Tensor& from, int64_t D, Index&& index) {
  const Tensor rows = new_contiguous(Device{}, {nodes.B, nodes.N, D}, aoti_dtype(from));
  const int64_t bytes = D * from.element_size();
  const char* source = static_cast<const char*>(from.const_data_ptr());
  char* to = static_cast<char*>(rows.mutable_data_ptr());
  for (int64_t b = 0; b < nodes.B; ++b) {
    for (int64_t n = 0; n < nodes.N; ++n, to += bytes) {
      if (n < nodes.length(b)) {
        std::memcpy(to, source + index(b, n) * bytes, bytes);
      } else {
        std::memset(to, 0, bytes);
      }
    }
  }
  return rows;
}

// The rows [R, D] of h [B, N, D] that are nodes, in float32.
Tensor valid_rows(const Nodes& nodes, const Tensor& h) {
  int64_t count = 0;
  for (int64_t b = 0; b < nodes.B; ++b) count += nodes.length(b);
  const int64_t D = h.size(2), bytes = D * h.element_size();
  Tensor rows = torch::stable::view(h, {nodes.B * nodes.N, D});
  if (count != nodes.B * nodes.N) {
    rows = new_contiguous(Device{}, {count, D}, aoti_dtype(h));
    char* to = static_cast<char*>(rows.mutable_data_ptr());
    const char* from = static_cast<const char*>(h.const_data_ptr());
    for (int64_t b = 0; b < nodes.B; ++b, from += nodes.N * bytes) {
      std::memcpy(to, from, nodes.length(b) * bytes);
      to += nodes.length(b) * bytes;
    }
  }
  return h.scalar_type() == ScalarType::Float ? rows : torch::stable::to(rows, ScalarType::Float);
}

// What the exit's adapter makes of h [B, N, D].
Tensor adapted(const Tensor& h, const DrafterArgs& drafter) {
  const std::vector<Tensor>& adapter = drafter.adapter;
  if (adapter.empty()) return h;
  STD_TORCH_CHECK(adapter.size() == 3, "adapter: got ", adapter.size(), " tensors, want 3 or none");
  check_shape(adapter[0], "adapter (norm)", {h.size(2)}, "[D]");
  const Tensor wide = rms_norm_linear(h, adapter[0], drafter.adapter_eps, adapter[1], {},
                                      2 * packed_inputs(adapter[2]), {}, {});
  return swiglu_linear(wide, adapter[2], {}, h.size(2), h);
}

std::tuple<Tensor, Tensor, std::vector<Tensor>> draft_step_op(
    Tensor tokens, OptionalTensor parents, OptionalTensor lengths, Tensor outputs, std::vector<Tensor> prefix,
    OptionalTensor prefix_parents, Tensor table, OptionalTensor own_norm, OptionalTensor own_weight,
    std::vector<Tensor> weights, std::vector<int64_t> parts, std::vector<Tensor> conv_biases, bool gated,
    double eps, bool neg_eigval, std::vector<Tensor> conv_states, std::vector<Tensor> states,
    OptionalTensor slots, std::optional<double> scale, std::vector<Tensor> adapter, double adapter_eps,
    Tensor norm, Tensor head, int64_t vocab, int64_t strategy) {
  const StackArgs stack{weights,    parts,       conv_biases, gated, eps,
                        neg_eigval, conv_states, states,      slots, scale};
  DraftStep step = draft_step(tokens, parents, lengths,
                              {table, own_norm, own_weight, stack, adapter, adapter_eps, norm, head, vocab},
                              {outputs, prefix, prefix_parents}, strategy);
  return {step.logits, step.outputs, std::move(step.entries)};
}

}  // namespace

DraftStep draft_step(const Tensor& tokens, const OptionalTensor& parents, const OptionalTensor& lengths,
                     const DrafterArgs& drafter, const Continued& earlier, int64_t strategy) {
  const Tensor &table = drafter.table, &outputs = earlier.outputs;
  const double eps = drafter.stack.eps;
  check_shape(table, "table", {-1, -1}, "[V, D]");
  check_contiguous(table, "table");
  const Nodes nodes = nodes_of(tokens, parents, lengths, outputs, table.size(0));
  const int64_t D = table.size(1);
  check_shape(outputs, "outputs", {nodes.B, nodes.earlier, D}, "[B, NP, D]");
  check_dtype(outputs, "outputs", table.scalar_type());
  STD_TORCH_CHECK(drafter.own_norm.has_value() == drafter.own_weight.has_value(),
                  "own_norm, own_weight: got one of the two, want both or none");
  // Of another size the operators would take them for the norms of heads.
  if (drafter.own_norm.has_value()) check_shape(*drafter.own_norm, "own[0]", {D}, "[D]");
  check_shape(drafter.norm, "norm", {D}, "[D]");
  STD_TORCH_CHECK(!drafter.stack.parts.empty(), "weights: got no blocks, want at least one");
  const size_t wanted = kEntryParts * drafter.stack.states.size();
  STD_TORCH_CHECK(earlier.prefix.size() == wanted, "prefix: got ", earlier.prefix.size(), " tensors, want ",
                  wanted, ", k, u, g and the raw projections of each mixer");
  for (size_t i = 0; i < wanted; i += kEntryParts) {
    check_shape(earlier.prefix[i], "prefix.factors.k", {nodes.B, nodes.earlier, -1, -1}, "[B, NP, HK, DK]");
  }
  Tensor x = gather(nodes, table, D, [&](int64_t b, int64_t n) { return nodes.tokens[b * nodes.N + n]; });
  if (drafter.own_weight.has_value()) {
    const Tensor above = gather(nodes, outputs, D,
                                [&](int64_t b, int64_t n) { return b * nodes.earlier + nodes.parent(b, n); });
    x = rms_norm_linear(above, *drafter.own_norm, eps, *drafter.own_weight, {}, D, {}, x);
  }
  StackOutputs made =
      verify_stack(x, drafter.stack, {parents, lengths, strategy}, earlier.prefix, earlier.parents);
  const Tensor& h = made.hidden.back();
  DraftStep step;
  step.logits = rms_norm_linear(valid_rows(nodes, adapted(h, drafter)), drafter.norm, eps, drafter.head, {},
                                drafter.vocab, {}, {});
  step.outputs = append(outputs, h);
  for (size_t i = 0; i < wanted; ++i) step.entries.push_back(append(earlier.prefix[i], made.entries[i]));
  return step;
}

}  // namespace specdec::binding

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def(
      "draft_step(Tensor tokens, Tensor? parents, Tensor? lengths, Tensor outputs, Tensor[] prefix, "
      "Tensor? prefix_parents, Tensor table, Tensor? own_norm, Tensor? own_weight, Tensor[] weights, "
      "int[] parts, Tensor[] conv_biases, bool gated, float eps, bool neg_eigval, Tensor[] conv_states, "
      "Tensor[] states, Tensor? slots, float? scale, Tensor[] adapter, float adapter_eps, Tensor norm, "
      "Tensor head, int vocab, int strategy) -> (Tensor logits, Tensor outputs, Tensor[] entries)");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("draft_step", TORCH_BOX(&specdec::binding::draft_step_op));
}
