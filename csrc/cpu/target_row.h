// A row of logits made ready to be sampled from: what is kept, and its sum.
#pragma once

#include "sampling_filter.h"

namespace specdec::cpu::SPECDEC_ISA {

template <typename T>
struct TargetRow {
  RowElements<T> weights;
  Support support;
  double total = 0.0;  // of the weights

  RowElements<T> probabilities() const {
    RowElements<T> p = weights;
    p.factor = p.scale.inverse_sum;
    return p;
  }

  // False where the row has no finite maximum or a NaN. `parts` [parts_of(V)] receives the sums of the
  // weights; `keys` has room for keys_wanted(settings, V), `listed` for listed_wanted(settings).
  bool make(const T* logits, int64_t V, const Settings& settings, double* parts, Key* keys, int32_t* listed) {
    RowScale& scale = weights.scale;
    weights.logits = logits;
    if (!find_largest(logits, V, parts, scale.largest)) return false;
    scale.inverse_t = inverse_of(settings.temperature);
    if (settings.top_k == 1) {
      const int64_t token = first_largest(logits, V, parts, scale.largest);
      keep(key_of(scale.largest, token));
      *listed = static_cast<int32_t>(token);
      support = {listed, 1};
    } else if (settings.top_k > 0) {
      const int64_t count = largest_keys(logits, V, settings.top_k, keys);
      Key last = *std::min_element(keys, keys + count, Ascending());
      if (settings.top_p < 1.0f) {
        uint64_t mass = 0;
        for (int64_t i = 0; i < count; ++i) mass += mass_of_key(keys[i], scale);
        last = nucleus_end(keys, count, mass_goal(mass, settings.top_p), scale);
      }
      keep(last);
      if (listed_wanted(settings) > 0) list(keys, count, last, listed);
    } else if (settings.top_p < 1.0f) {
      keep(NucleusSearch<T>(weights, V, settings.top_p).last(keys));
    }
    if (settings.min_p > 0.0f) {
      weights.filtered = true;
      scale.min_weight = settings.min_p;
    }
    if (!(scale.last_rank > 0)) weights.last = -INFINITY;
    total = sum_parts(weights, V, support, parts);
    scale.inverse_sum = static_cast<float>(1.0 / total);
    return true;
  }

 private:
  void keep(Key last) {
    weights.filtered = true;
    weights.last = logit_of(last);
    weights.scale.last_rank = key_rank(last);
    weights.scale.last_token = token_of(last);
  }

  void list(const Key* keys, int64_t count, Key last, int32_t* listed) {
    int64_t n = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (keys[i] >= last) listed[n++] = static_cast<int32_t>(token_of(keys[i]));
    }
    std::sort(listed, listed + n, Ascending());
    support = {listed, n};
  }
};

}  // namespace specdec::cpu::SPECDEC_ISA
