// A row of logits made ready to be sampled from: its weights are made once and stored. Of a row that keeps
// few tokens, only their list is.
#pragma once

#include "sampling_filter.h"

namespace specdec::cpu::SPECDEC_ISA {

// The weights of a row, which summing them stores.
template <typename T, bool kExponentials>
struct NewWeights {
  const RowElements<T>& row;
  float* weights;  // [V]; with kExponentials they hold the weights as if all tokens were kept

  double at(int64_t i) const { return static_cast<double>(weights[i] = row.single(i)); }
  SPECDEC_INLINE DoublePair pair(int64_t i) const {
    const Vec w = kExponentials ? row.kept(Vec::load(weights + i), i) : row.vec(i);
    w.store(weights + i);
    return widen(w);
  }
  bool plain(int64_t segment) const { return row.plain(segment); }
};

// A row's weights, or its probabilities.
template <typename T>
struct TargetElements {
  const RowElements<T>* row = nullptr;
  const float* weights = nullptr;  // [V]; null: of a row with a list, each is made from its logit
  float factor = 1.0f;             // 1: weights; row->scale.inverse_sum: probabilities

  double at(int64_t i) const {
    return static_cast<double>((weights != nullptr ? weights[i] : row->single(i)) * factor);
  }
  SPECDEC_INLINE DoublePair pair(int64_t i) const { return widen(Vec::load(weights + i) * Vec::set(factor)); }
  bool plain(int64_t) const { return true; }
};

// Where a row is made. `stored` is null where its settings want a list.
struct RowRoom {
  double* parts;    // [parts_of(V)] the sums of its weights
  Key* keys;        // [keys_wanted(settings, V)]
  int32_t* listed;  // [listed_wanted(settings)]
  float* stored;    // [V]
};

template <typename T>
struct TargetRow {
  RowElements<T> made;
  Support support;
  double total = 0.0;  // of the weights
  const float* stored = nullptr;

  TargetElements<T> weights() const { return {&made, stored, 1.0f}; }
  TargetElements<T> probabilities() const { return {&made, stored, made.scale.inverse_sum}; }

  // False where the row has no finite maximum or a NaN.
  bool make(const T* logits, int64_t V, const Settings& settings, const RowRoom& room) {
    RowScale& scale = made.scale;
    double* const parts = room.parts;
    Key* const keys = room.keys;
    int32_t* const listed = room.listed;
    bool exponentials = false;
    made.logits = logits;
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
      keep(NucleusSearch<T>(made, V, room.stored).last(settings.top_p, keys));
      exponentials = true;
    }
    if (settings.min_p > 0.0f) {
      made.filtered = true;
      scale.min_weight = settings.min_p;
    }
    if (!(scale.last_rank > 0)) made.last = -INFINITY;
    if (support.tokens != nullptr) {
      total = sum_parts(weights(), V, support, parts);
    } else {
      stored = room.stored;
      total = exponentials ? sum_parts(NewWeights<T, true>{made, room.stored}, V, support, parts)
                           : sum_parts(NewWeights<T, false>{made, room.stored}, V, support, parts);
    }
    scale.inverse_sum = static_cast<float>(1.0 / total);
    return true;
  }

 private:
  void keep(Key last) {
    made.filtered = true;
    made.last = logit_of(last);
    made.scale.last_rank = key_rank(last);
    made.scale.last_token = token_of(last);
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
