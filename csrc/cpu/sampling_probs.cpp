// sampling_probs: the rows that acceptance sees.
#include "ops.h"
#include "scratch.h"
#include "target_row.h"

namespace specdec::cpu::SPECDEC_ISA {

namespace {

template <typename T>
void write_probs(const SamplingProbsParams& p, int64_t r, char* scratch) {
  const Settings settings(p.sampling, r, p.V);
  double* parts = reinterpret_cast<double*>(scratch);
  Key* keys = reinterpret_cast<Key*>(parts + parts_of(p.V));
  int32_t* listed = reinterpret_cast<int32_t*>(keys + keys_wanted(settings, p.V));
  float* out = p.probs + r * p.V;
  TargetRow<T> row;
  // The weights are made in place.
  if (!row.make(static_cast<const T*>(p.logits) + r * p.stride, p.V, settings, {parts, keys, listed, out})) {
    std::fill(out, out + p.V, NAN);
    return;
  }
  const float inverse_sum = row.made.scale.inverse_sum;
  if (row.support.tokens != nullptr) {
    std::fill(out, out + p.V, 0.0f);
    for (int64_t i = 0; i < row.support.count; ++i) {
      out[row.support.tokens[i]] = row.made.single(row.support.tokens[i]) * inverse_sum;
    }
    return;
  }
  for (int64_t i = 0; i < p.V; ++i) out[i] = out[i] * inverse_sum;
}

}  // namespace

Status sampling_probs(const SamplingProbsParams& p) {
  int64_t bytes = 0;
  for (int64_t r = 0; r < p.R; ++r) {
    const Settings settings(p.sampling, r, p.V);
    bytes = std::max<int64_t>(
        bytes, keys_wanted(settings, p.V) * sizeof(Key) + listed_wanted(settings) * sizeof(int32_t));
  }
  bytes += parts_of(p.V) * static_cast<int64_t>(sizeof(double));
  return visit_dtype(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    each_sequence(p.R, 1, p.V, [&](int64_t r) {
      write_probs<T>(p, r, reinterpret_cast<char*>(thread_scratch(static_cast<size_t>(bytes) / 4 + 1)));
    });
    return Status::kOk;
  });
}

}  // namespace specdec::cpu::SPECDEC_ISA
