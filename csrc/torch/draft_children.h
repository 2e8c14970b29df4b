// The children of drafted nodes, from the logits after these: the likeliest tokens, or tokens that are drawn.
#pragma once

#include "specdec/acceptance_params.h"
#include "tensor_args.h"

namespace specdec::binding {

// The tokens that the columns of the logits stand for; without a list the columns themselves.
struct DraftVocabulary {
  const int64_t* tokens = nullptr;  // [V']
  int64_t columns = 0, size = 0;    // V', V
};

// `count` children of each row of logits.
struct Children {
  std::vector<int64_t> tokens;  // -1 where there are no more
  std::vector<float> probs;     // each one's in its row
  std::vector<double> sure;     // what the drafter itself gave it, before temperature and filters
  Tensor rows;                  // [R, V] what was drawn from; undefined where nothing was
};

// The likeliest tokens of logits [R, V'] times `scales`, which may be empty.
Children likeliest_children(const Tensor& logits, int64_t count, const std::vector<float>& scales,
                            const DraftVocabulary& vocabulary);

// How a call draws: an entry a sequence.
struct Drawing {
  SamplingView sampling;
  const uint64_t* seeds = nullptr;
  const int64_t* positions = nullptr;
};

// A draw from each row of logits [R, V'], one child each: an only child has the same law whether it is drawn
// with replacement or without.
Children drawn_children(const Tensor& logits, const std::vector<int64_t>& sequences,
                        const std::vector<int32_t>& nodes, const Drawing& drawing,
                        const DraftVocabulary& vocabulary);

}  // namespace specdec::binding
