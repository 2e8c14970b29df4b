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

// Optional tensors are absent where the Python argument is None. Without gate the returned g is an empty [0] tensor:
// an operator's outputs are always tensors. `strategy`, `mode` and `activation` are the values of the C++ enums.
STABLE_TORCH_LIBRARY(specdec, m) {
  m.def(
      "verify(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor state, Tensor? slots, Tensor? parents, "
      "Tensor? lengths, Tensor? prefix_k, Tensor? prefix_u, Tensor? prefix_g, Tensor? prefix_parents, float? scale, "
      "bool qk_l2norm, int strategy) -> (Tensor out, Tensor k, Tensor u, Tensor g)");
  m.def(
      "verify_deferred(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor(a!) state, Tensor? slots, "
      "Tensor? parents, Tensor? lengths, Tensor pending_k, Tensor pending_u, Tensor? pending_g, Tensor? pending_path, "
      "Tensor? pending_path_lengths, float? scale, bool qk_l2norm, int strategy) -> (Tensor out, Tensor k, Tensor u, "
      "Tensor g)");
  m.def(
      "commit(Tensor(a!) state, Tensor k, Tensor u, Tensor? g, Tensor? path, Tensor? path_lengths, Tensor? slots, "
      "int mode) -> ()");
  m.def(
      "prefill(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor(a!) state, Tensor? slots, "
      "Tensor? lengths, Tensor? cu_seqlens, float? scale, bool qk_l2norm) -> Tensor");
  m.def(
      "conv_verify(Tensor x, Tensor weight, Tensor? bias, Tensor conv_state, Tensor? slots, Tensor? parents, "
      "Tensor? lengths, Tensor? prefix_x, Tensor? prefix_parents, int activation) -> Tensor");
  m.def(
      "conv_verify_deferred(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) conv_state, Tensor? slots, "
      "Tensor? parents, Tensor? lengths, Tensor pending_x, Tensor? pending_path, Tensor? pending_path_lengths, "
      "int activation) -> Tensor");
  m.def(
      "conv_commit(Tensor(a!) conv_state, Tensor x, Tensor? path, Tensor? path_lengths, Tensor? slots) -> ()");
}
