// Binding of the likeliest tokens: likeliest; and the children of drafted nodes.
#include "draft_children.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "../cpu/ops.h"

namespace specdec::binding {

namespace {

// The likeliest `count` of logits [R, V'] and their probabilities, [R, count] each.
void take_likeliest(const Tensor& logits, int64_t count, const float* scales, int64_t* tokens, float* probs) {
  LikeliestParams p;
  p.R = logits.size(0);
  p.V = logits.size(1);
  p.K = count;
  p.logits = present<float>(logits);
  p.scale = scales;
  p.tokens = tokens;
  p.probs = probs;
  check_status(cpu::likeliest(p), "likeliest");
}

int64_t token_of(int64_t column, const DraftVocabulary& vocabulary) {
  if (vocabulary.tokens == nullptr || column < 0) return column;
  const int64_t token = vocabulary.tokens[column];
  STD_TORCH_CHECK(0 <= token && token < vocabulary.size, "vocabulary: got token ", token, ", want 0 to ",
                  vocabulary.size - 1);
  return token;
}

// Logits [R, V] over all tokens; those without a column have no chance.
Tensor over_all_tokens(const Tensor& logits, const DraftVocabulary& vocabulary) {
  if (vocabulary.tokens == nullptr && vocabulary.columns == vocabulary.size) return logits;
  const int64_t R = logits.size(0), V = vocabulary.size, columns = vocabulary.columns;
  const Tensor all = new_contiguous(Device{}, {R, V}, aoti_torch_dtype_float32());
  const float* from = present<float>(logits);
  float* to = static_cast<float*>(all.mutable_data_ptr());
  std::fill(to, to + R * V, -std::numeric_limits<float>::infinity());
  for (int64_t r = 0; r < R; ++r) {
    for (int64_t c = 0; c < columns; ++c) to[r * V + token_of(c, vocabulary)] = from[r * columns + c];
  }
  return all;
}

// The probability of a logit, from that of the largest one; the bits of `probabilities_of` in Python.
double chance(float most, float logit, float largest) {
  return static_cast<double>(most) * std::exp(static_cast<double>(logit) - static_cast<double>(largest));
}

template <typename T>
std::vector<T> of_rows(const T* of_sequences, const std::vector<int64_t>& sequences) {
  std::vector<T> values;
  for (int64_t sequence : sequences) values.push_back(of_sequences[sequence]);
  return values;
}

std::tuple<Tensor, Tensor> likeliest(Tensor logits, int64_t count, OptionalTensor inverse_temperatures) {
  check_dtype(logits, "logits", ScalarType::Float);
  check_shape(logits, "logits", {-1, -1}, "[R, V]");
  check_contiguous(logits, "logits");
  const int64_t R = logits.size(0);
  STD_TORCH_CHECK(1 <= count && count <= kMostLikeliest, "count: got ", count, ", want 1 to ",
                  kMostLikeliest);
  const float* scales = nullptr;
  if (inverse_temperatures.has_value()) {
    scales = float_vector(*inverse_temperatures, "inverse_temperatures", R, "[R]");
  }
  const Tensor tokens = new_contiguous(Device{}, {R, count}, aoti_torch_dtype_int64());
  const Tensor probs = new_contiguous(Device{}, {R, count}, aoti_torch_dtype_float32());
  take_likeliest(logits, count, scales, static_cast<int64_t*>(tokens.mutable_data_ptr()),
                 static_cast<float*>(probs.mutable_data_ptr()));
  return {tokens, probs};
}

}  // namespace

Children likeliest_children(const Tensor& logits, int64_t count, const std::vector<float>& scales,
                            const DraftVocabulary& vocabulary) {
  const int64_t R = logits.size(0), V = logits.size(1);
  Children found{std::vector<int64_t>(R * count), std::vector<float>(R * count), {}, {}};
  take_likeliest(logits, count, scales.empty() ? nullptr : scales.data(), found.tokens.data(),
                 found.probs.data());
  found.sure.assign(found.probs.begin(), found.probs.end());
  if (!scales.empty()) {  // of the drafter's own distribution its likeliest token tells the scale
    std::vector<int64_t> best(R);
    std::vector<float> sure(R);
    take_likeliest(logits, 1, nullptr, best.data(), sure.data());
    const float* row = present<float>(logits);
    for (int64_t r = 0; r < R; ++r, row += V) {
      for (int64_t i = r * count; i < (r + 1) * count; ++i) {
        if (found.tokens[i] >= 0) found.sure[i] = chance(sure[r], row[found.tokens[i]], row[best[r]]);
      }
    }
  }
  for (int64_t& token : found.tokens) token = token_of(token, vocabulary);
  return found;
}

Children drawn_children(const Tensor& logits, const std::vector<int64_t>& sequences,
                        const std::vector<int32_t>& nodes, const Drawing& drawing,
                        const DraftVocabulary& vocabulary) {
  const int64_t R = logits.size(0);
  Children found{std::vector<int64_t>(R), std::vector<float>(R), std::vector<double>(R), {}};
  std::vector<int64_t> best(R);
  std::vector<float> most(R);
  take_likeliest(logits, 1, nullptr, best.data(), most.data());
  const Tensor all = over_all_tokens(logits, vocabulary);
  SamplingProbsParams p;
  p.R = R;
  p.V = all.size(1);
  p.logits = present<float>(all);
  p.stride = p.V;
  const auto temperature = of_rows(drawing.sampling.temperature, sequences);
  const auto top_k = of_rows(drawing.sampling.top_k, sequences);
  const auto top_p = of_rows(drawing.sampling.top_p, sequences);
  const auto min_p = of_rows(drawing.sampling.min_p, sequences);
  p.sampling = {temperature.data(), top_k.data(), top_p.data(), min_p.data()};
  found.rows = new_contiguous(Device{}, {R, p.V}, aoti_torch_dtype_float32());
  p.probs = static_cast<float*>(found.rows.mutable_data_ptr());
  check_status(cpu::sampling_probs(p), "sampling_probs");
  DrawParams draw;
  draw.R = R;
  draw.V = p.V;
  draw.K = 1;
  draw.probs = p.probs;
  draw.stride = p.V;
  const auto seeds = of_rows(drawing.seeds, sequences);
  const auto positions = of_rows(drawing.positions, sequences);
  draw.seeds = seeds.data();
  draw.positions = positions.data();
  draw.nodes = nodes.data();
  draw.tokens = found.tokens.data();
  check_status(cpu::draw_tokens(draw), "draw_tokens");
  const float *own = present<float>(logits), *everywhere = present<float>(all);
  for (int64_t r = 0; r < R; ++r) {
    const int64_t token = found.tokens[r];
    if (token < 0) continue;
    found.probs[r] = p.probs[r * p.V + token];
    found.sure[r] = chance(most[r], everywhere[r * p.V + token], own[r * logits.size(1) + best[r]]);
  }
  return found;
}

}  // namespace specdec::binding

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def("likeliest(Tensor logits, int count, Tensor? inverse_temperatures) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) { m.impl("likeliest", TORCH_BOX(&specdec::binding::likeliest)); }
