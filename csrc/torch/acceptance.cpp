// Bindings of sampling: accept_greedy, accept_sampled, sampling_probs, draw_tokens.
#include <cmath>

#include "backend.h"
#include "specdec/acceptance_params.h"
#include "specdec/sampling_math.h"
#include "views.h"

namespace specdec::binding {

namespace {

using Decision = std::tuple<Tensor, Tensor, Tensor>;

constexpr int64_t kMaxVocabulary = int64_t{1} << 30;  // V; that of a draw without replacement is 2^21

template <typename T>
const T* values_of(const Tensor& t, const char* name, ScalarType dtype, std::initializer_list<int64_t> want,
                   const char* dims) {
  check_dtype(t, name, dtype);
  check_shape(t, name, want, dims);
  check_contiguous(t, name);
  return present<T>(t);
}

void check_vocabulary(const char* name, int64_t V, int64_t most) {
  STD_TORCH_CHECK(V >= 1 && V <= most, name, ": got V = ", V, ", want 1 to ", most);
}

// Logits [B, N, V], and what is drafted.
template <typename Params>
void fill_round(Params& p, const Tensor& logits, const Tensor& tokens, const OptionalTensor& parents,
                const OptionalTensor& lengths) {
  check_shape(logits, "logits", {-1, -1, -1}, "[B, N, V]");
  check_last_contiguous(logits, "logits");
  p.B = logits.size(0);
  p.N = logits.size(1);
  p.V = logits.size(2);
  check_vocabulary("logits", p.V, kMaxVocabulary);
  p.dtype = float_dtype(logits, "logits");
  p.logits = logits.const_data_ptr();
  p.stride_b = logits.stride(0);
  p.stride_n = logits.stride(1);
  p.draft.tokens = values_of<int64_t>(tokens, "tokens", ScalarType::Long, {p.B, p.N}, "[B, N]");
  p.draft.lengths = int32_or_null(lengths, "lengths", {p.B}, "[B]");
  p.draft.parents = parents_view(parents, "parents", Rows{p.B, nullptr}, p.N, 0, p.draft.lengths);
  if (!values_on_host()) return;
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t n = 1; n < valid_length(p.draft.lengths, b, p.N); ++n) {
      const int64_t token = p.draft.tokens[b * p.N + n];
      STD_TORCH_CHECK(token >= 0 && token < p.V, "tokens: row ", b, " node ", n, " is ", token,
                      ", want a token in [0, ", p.V, ")");
      STD_TORCH_CHECK(p.draft.parents == nullptr || p.draft.parents[b * p.N + n] >= 0, "parents: row ", b,
                      " node ", n, " is -1, want an earlier node: node 0 is the only root");
    }
  }
}

// The outputs, of which `p` then holds the pointers.
template <typename Params>
Decision decide(Params& p, const Operands& operands, const Device& device, const char* op) {
  Tensor path = new_contiguous(device, {p.B, p.N}, aoti_torch_dtype_int32());
  Tensor path_lengths = new_contiguous(device, {p.B}, aoti_torch_dtype_int32());
  Tensor next_token = new_contiguous(device, {p.B}, aoti_torch_dtype_int64());
  p.accepted = {static_cast<int32_t*>(path.mutable_data_ptr()),
                static_cast<int32_t*>(path_lengths.mutable_data_ptr()),
                static_cast<int64_t*>(next_token.mutable_data_ptr()), p.N};
  const Named outputs[] = {{"path", path}, {"path_lengths", path_lengths}, {"next_token", next_token}};
  check_status(run(p, operands, outputs), op);
  return {path, path_lengths, next_token};
}

Decision accept_greedy(const Tensor& logits, const Tensor& tokens, const OptionalTensor& parents,
                       const OptionalTensor& lengths) {
  const Named inputs[] = {{"tokens", tokens}, {"parents", parents}, {"lengths", lengths}};
  const Operands operands{{{"logits", logits}}, Access::kRead, inputs};
  const Device device = device_of(operands);
  AcceptGreedyParams p;
  fill_round(p, logits, tokens, parents, lengths);
  return decide(p, operands, device, "accept_greedy");
}

void check_setting(bool ok, const char* name, int64_t row, float got, const char* want) {
  STD_TORCH_CHECK(ok, name, ": row ", row, " is ", got, ", want ", want);
}

// A setting of each of the `rows`; those of absent rows (`lengths` 0) are padding.
SamplingView sampling_view(const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                           const Tensor& min_p, int64_t rows, const char* dims, const int32_t* lengths) {
  const SamplingView view{values_of<float>(temperature, "temperature", ScalarType::Float, {rows}, dims),
                          values_of<int32_t>(top_k, "top_k", ScalarType::Int, {rows}, dims),
                          values_of<float>(top_p, "top_p", ScalarType::Float, {rows}, dims),
                          values_of<float>(min_p, "min_p", ScalarType::Float, {rows}, dims)};
  if (!values_on_host()) return view;
  for (int64_t i = 0; i < rows; ++i) {
    if (valid_length(lengths, i, 1) == 0) continue;
    const float t = view.temperature[i];
    check_setting(t >= 0.0f && std::isfinite(t), "temperature", i, t, "0 (greedy) or a positive number");
    STD_TORCH_CHECK(view.top_k[i] >= 0, "top_k: row ", i, " is ", view.top_k[i], ", want 0 (all) or more");
    check_setting(view.top_p[i] > 0.0f && view.top_p[i] <= 1.0f, "top_p", i, view.top_p[i], "0 < top_p <= 1");
    check_setting(view.min_p[i] >= 0.0f && view.min_p[i] <= 1.0f, "min_p", i, view.min_p[i],
                  "0 <= min_p <= 1");
  }
  return view;
}

// Of siblings that a rule has drawn from one row, node n names another than its eldest sibling: -1 where
// there is none.
int64_t stray_sibling(const AcceptSampledParams& p, int64_t b, int64_t length) {
  if (p.draft.parents == nullptr) return -1;
  const int32_t* parents = p.draft.parents + b * p.N;
  const int32_t* rows = p.draft_rows + b * p.N;
  std::vector<int64_t> eldest(static_cast<size_t>(length), 0);
  for (int64_t n = 1; n < length; ++n) {
    int64_t& first = eldest[static_cast<size_t>(parents[n])];
    if (first == 0) first = n;
    if (rows[n] != rows[first]) return n;
  }
  return -1;
}

void check_rule(const AcceptSampledParams& p, int64_t b) {
  const int64_t length = valid_length(p.draft.lengths, b, p.N);
  if (length == 0) return;
  constexpr int32_t kLast = static_cast<int32_t>(AcceptRule::kTraversalWithoutReplacement);
  const int32_t code = p.rules[b];
  STD_TORCH_CHECK(code >= 0 && code <= kLast, "rules: row ", b, " is ", code, ", want an AcceptRule, 0 to ",
                  kLast);
  const AcceptRule rule = static_cast<AcceptRule>(code);
  if (rule == AcceptRule::kFollow || length == 1) return;
  STD_TORCH_CHECK(p.draft_probs != nullptr, "draft_probs: got None, want the rows that the drafts of row ", b,
                  " were drawn from, for rule ", code);
  for (int64_t n = 1; n < length; ++n) {
    const int32_t row = p.draft_rows[b * p.N + n];
    STD_TORCH_CHECK(row >= 0 && row < p.R, "draft_rows: row ", b, " node ", n, " is ", row,
                    ", want a row of draft_probs in [0, ", p.R, ")");
  }
  const bool one_row = rule == AcceptRule::kKSeq || rule == AcceptRule::kRecursiveWithoutReplacement ||
                       rule == AcceptRule::kTraversalWithoutReplacement;
  const int64_t stray = one_row ? stray_sibling(p, b, length) : -1;
  STD_TORCH_CHECK(stray < 0, "draft_rows: row ", b, " node ", stray, " is ", p.draft_rows[b * p.N + stray],
                  ", want the row of its eldest sibling, for rule ", code);
}

Decision accept_sampled(const Tensor& logits, const Tensor& tokens, const OptionalTensor& parents,
                        const OptionalTensor& lengths, const OptionalTensor& draft_probs,
                        const OptionalTensor& draft_rows, const Tensor& rules, const Tensor& temperature,
                        const Tensor& top_k, const Tensor& top_p, const Tensor& min_p, const Tensor& seeds,
                        const Tensor& positions) {
  const Named inputs[] = {{"tokens", tokens},
                          {"parents", parents},
                          {"lengths", lengths},
                          {"draft_probs", draft_probs},
                          {"draft_rows", draft_rows},
                          {"rules", rules},
                          {"temperature", temperature},
                          {"top_k", top_k},
                          {"top_p", top_p},
                          {"min_p", min_p},
                          {"seeds", seeds},
                          {"positions", positions}};
  const Operands operands{{{"logits", logits}}, Access::kRead, inputs};
  const Device device = device_of(operands);
  AcceptSampledParams p;
  fill_round(p, logits, tokens, parents, lengths);
  STD_TORCH_CHECK(draft_probs.has_value() == draft_rows.has_value(), "draft_rows: got ",
                  draft_rows.has_value() ? "a tensor" : "None", ", want ",
                  draft_probs.has_value() ? "a tensor with draft_probs" : "None without draft_probs");
  if (draft_probs.has_value()) {
    check_dtype(*draft_probs, "draft_probs", ScalarType::Float);
    check_shape(*draft_probs, "draft_probs", {-1, p.V}, "[R, V]");
    check_last_contiguous(*draft_probs, "draft_probs");
    p.draft_probs = present<float>(*draft_probs);
    p.R = draft_probs->size(0);
    p.draft_stride = draft_probs->stride(0);
    p.draft_rows = int32_or_null(draft_rows, "draft_rows", {p.B, p.N}, "[B, N]");
  }
  p.rules = values_of<int32_t>(rules, "rules", ScalarType::Int, {p.B}, "[B]");
  p.sampling = sampling_view(temperature, top_k, top_p, min_p, p.B, "[B]", p.draft.lengths);
  p.seeds =
      reinterpret_cast<const uint64_t*>(values_of<int64_t>(seeds, "seeds", ScalarType::Long, {p.B}, "[B]"));
  p.positions = values_of<int64_t>(positions, "positions", ScalarType::Long, {p.B}, "[B]");
  if (values_on_host()) {
    for (int64_t b = 0; b < p.B; ++b) check_rule(p, b);
  }
  return decide(p, operands, device, "accept_sampled");
}

Tensor sampling_probs(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
                      const Tensor& top_p, const Tensor& min_p) {
  const Named inputs[] = {{"temperature", temperature}, {"top_k", top_k}, {"top_p", top_p}, {"min_p", min_p}};
  const Operands operands{{{"logits", logits}}, Access::kRead, inputs};
  const Device device = device_of(operands);
  SamplingProbsParams p;
  check_shape(logits, "logits", {-1, -1}, "[R, V]");
  check_last_contiguous(logits, "logits");
  p.R = logits.size(0);
  p.V = logits.size(1);
  check_vocabulary("logits", p.V, kMaxVocabulary);
  p.dtype = float_dtype(logits, "logits");
  p.logits = logits.const_data_ptr();
  p.stride = logits.stride(0);
  p.sampling = sampling_view(temperature, top_k, top_p, min_p, p.R, "[R]", nullptr);
  Tensor probs = new_contiguous(device, {p.R, p.V}, aoti_torch_dtype_float32());
  p.probs = static_cast<float*>(probs.mutable_data_ptr());
  const Named outputs[] = {{"probs", probs}};
  check_status(run(p, operands, outputs), "sampling_probs");
  return probs;
}

Tensor draw_tokens(const Tensor& probs, int64_t count, bool replacement, const Tensor& seeds,
                   const Tensor& positions, const Tensor& nodes) {
  const Named inputs[] = {{"seeds", seeds}, {"positions", positions}, {"nodes", nodes}};
  const Operands operands{{{"probs", probs}}, Access::kRead, inputs};
  const Device device = device_of(operands);
  DrawParams p;
  check_dtype(probs, "probs", ScalarType::Float);
  check_shape(probs, "probs", {-1, -1}, "[R, V]");
  check_last_contiguous(probs, "probs");
  p.R = probs.size(0);
  p.V = probs.size(1);
  check_vocabulary("probs", p.V, replacement ? kMaxVocabulary : int64_t{1} << kRaceTokenBits);
  STD_TORCH_CHECK(count >= 1 && count <= kMaxDraws, "count: got ", count, ", want 1 to ", kMaxDraws);
  p.K = count;
  p.replacement = replacement;
  p.probs = present<float>(probs);
  p.stride = probs.stride(0);
  p.seeds =
      reinterpret_cast<const uint64_t*>(values_of<int64_t>(seeds, "seeds", ScalarType::Long, {p.R}, "[R]"));
  p.positions = values_of<int64_t>(positions, "positions", ScalarType::Long, {p.R}, "[R]");
  p.nodes = values_of<int32_t>(nodes, "nodes", ScalarType::Int, {p.R}, "[R]");
  if (values_on_host()) {
    for (int64_t i = 0; i < p.R; ++i) {
      STD_TORCH_CHECK(p.nodes[i] >= 0 && p.nodes[i] < kMaxDrawNodes, "nodes: row ", i, " is ", p.nodes[i],
                      ", want 0 to ", kMaxDrawNodes - 1);
    }
  }
  Tensor tokens = new_contiguous(device, {p.R, p.K}, aoti_torch_dtype_int64());
  p.tokens = static_cast<int64_t*>(tokens.mutable_data_ptr());
  const Named outputs[] = {{"tokens", tokens}};
  check_status(run(p, operands, outputs), "draw_tokens");
  return tokens;
}

}  // namespace

}  // namespace specdec::binding

SPECDEC_OPERATORS(m) {
  m.impl("accept_greedy", TORCH_BOX(&specdec::binding::accept_greedy));
  m.impl("accept_sampled", TORCH_BOX(&specdec::binding::accept_sampled));
  m.impl("sampling_probs", TORCH_BOX(&specdec::binding::sampling_probs));
  m.impl("draw_tokens", TORCH_BOX(&specdec::binding::draw_tokens));
}
