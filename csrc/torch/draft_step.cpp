// Bindings of a step of a recurrent drafter: draft_step, likeliest.
#include "draft_step.h"

#include <cstring>

#include "../cpu/ops.h"
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

DraftStep draft_step_op(Tensor tokens, OptionalTensor parents, OptionalTensor lengths, Tensor outputs,
                        Tensor table, OptionalTensor own_norm, OptionalTensor own_weight,
                        std::vector<Tensor> weights, OptionalTensor conv_bias, bool gated, double eps,
                        bool neg_eigval, Tensor conv_state, Tensor state, OptionalTensor slots,
                        OptionalTensor prefix_k, OptionalTensor prefix_u, OptionalTensor prefix_g,
                        OptionalTensor prefix_parents, OptionalTensor prefix_mixed, Tensor norm, Tensor head,
                        int64_t vocab, std::optional<double> scale, int64_t strategy) {
  return draft_step(tokens, parents, lengths, outputs,
                    {table, own_norm, own_weight, weights, conv_bias, gated, eps, neg_eigval, conv_state,
                     state, slots, norm, head, vocab, scale},
                    {prefix_k, prefix_u, prefix_g, prefix_parents, prefix_mixed}, strategy);
}

std::tuple<Tensor, Tensor> likeliest(Tensor logits, int64_t count, OptionalTensor inverse_temperatures) {
  check_dtype(logits, "logits", ScalarType::Float);
  check_shape(logits, "logits", {-1, -1}, "[R, V]");
  check_contiguous(logits, "logits");
  LikeliestParams p;
  p.R = logits.size(0);
  p.V = logits.size(1);
  p.K = count;
  STD_TORCH_CHECK(1 <= count && count <= kMostLikeliest, "count: got ", count, ", want 1 to ",
                  kMostLikeliest);
  p.logits = present<float>(logits);
  if (inverse_temperatures.has_value()) {
    p.scale = float_vector(*inverse_temperatures, "inverse_temperatures", p.R, "[R]");
  }
  const Tensor tokens = new_contiguous(Device{}, {p.R, count}, aoti_torch_dtype_int64());
  const Tensor probs = new_contiguous(Device{}, {p.R, count}, aoti_torch_dtype_float32());
  p.tokens = static_cast<int64_t*>(tokens.mutable_data_ptr());
  p.probs = static_cast<float*>(probs.mutable_data_ptr());
  check_status(cpu::likeliest(p), "likeliest");
  return {tokens, probs};
}

}  // namespace

DraftStep draft_step(const Tensor& tokens, const OptionalTensor& parents, const OptionalTensor& lengths,
                     const Tensor& outputs, const DrafterArgs& drafter, const BlockPrefix& prefix,
                     int64_t strategy) {
  const Tensor& table = drafter.table;
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
  for (const auto* part : {&prefix.k, &prefix.u, &prefix.g, &prefix.mixed}) {
    STD_TORCH_CHECK(part->has_value(), "prefix: got None, want the nodes that a step continues");
  }
  check_shape(*prefix.k, "prefix.factors.k", {nodes.B, nodes.earlier, -1, -1}, "[B, NP, HK, DK]");
  Tensor x = gather(nodes, table, D, [&](int64_t b, int64_t n) { return nodes.tokens[b * nodes.N + n]; });
  if (drafter.own_weight.has_value()) {
    const Tensor above = gather(nodes, outputs, D,
                                [&](int64_t b, int64_t n) { return b * nodes.earlier + nodes.parent(b, n); });
    x = rms_norm_linear(above, *drafter.own_norm, drafter.eps, *drafter.own_weight, {}, D, {}, x);
  }
  const auto [h, o, mixed, k, u, g] = verify_block(
      x,
      {drafter.weights, drafter.conv_bias, drafter.gated, drafter.eps, drafter.neg_eigval, drafter.conv_state,
       drafter.state, drafter.slots, parents, lengths, drafter.scale, strategy},
      prefix);
  const Tensor logits = rms_norm_linear(valid_rows(nodes, h), drafter.norm, drafter.eps, drafter.head, {},
                                        drafter.vocab, {}, {});
  return {logits,
          append(outputs, h),
          append(*prefix.mixed, mixed),
          append(*prefix.k, k),
          append(*prefix.u, u),
          append(*prefix.g, g)};
}

}  // namespace specdec::binding

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def(
      "draft_step(Tensor tokens, Tensor? parents, Tensor? lengths, Tensor outputs, Tensor table, "
      "Tensor? own_norm, Tensor? own_weight, Tensor[] weights, Tensor? conv_bias, bool gated, float eps, "
      "bool neg_eigval, Tensor conv_state, Tensor state, Tensor? slots, Tensor? prefix_k, Tensor? prefix_u, "
      "Tensor? prefix_g, Tensor? prefix_parents, Tensor? prefix_mixed, Tensor norm, Tensor head, int vocab, "
      "float? scale, int strategy) -> (Tensor logits, Tensor outputs, Tensor mixed, Tensor k, Tensor u, "
      "Tensor g)");
  m.def("likeliest(Tensor logits, int count, Tensor? inverse_temperatures) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("draft_step", TORCH_BOX(&specdec::binding::draft_step_op));
  m.impl("likeliest", TORCH_BOX(&specdec::binding::likeliest));
}
