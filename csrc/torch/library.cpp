// The schemas of every operator in the namespace `specdec`. Mutated arguments say so; defaults live here.
#include <algorithm>

#include "tensor_args.h"

namespace specdec::binding {

void check_slots(const int32_t* slots, int64_t B, int64_t pool) {
  if (slots == nullptr) {
    STD_TORCH_CHECK(B <= pool, "slots: got None with ", B, " rows, but the state pool has ", pool,
                    " slots; pass slots");
    return;
  }
  std::vector<int32_t> used;
  for (int64_t b = 0; b < B; ++b) {
    STD_TORCH_CHECK(slots[b] < pool, "slots: row ", b, " is ", slots[b], ", want less than the pool's ", pool,
                    " slots");
    if (slots[b] >= 0) used.push_back(slots[b]);
  }
  std::sort(used.begin(), used.end());
  const auto twice = std::adjacent_find(used.begin(), used.end());
  STD_TORCH_CHECK(twice == used.end(), "slots: slot ", twice == used.end() ? 0 : *twice,
                  " is named by two rows, want distinct slots");
}

}  // namespace specdec::binding

STABLE_TORCH_LIBRARY(specdec, m) {
  m.def(
      "conv_commit(Tensor(a!) conv_state, Tensor x, Tensor? path=None, Tensor? path_lengths=None, *, Tensor? "
      "slots=None)"
      " -> ()");
}
