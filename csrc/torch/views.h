// Checked views of the arguments that several operators share: slots, trees, paths, states, factors. Each
// function checks what it reads before anything is written and names the argument in its message. Rows of
// negative slots and entries beyond a row's length are padding and are not inspected. What is in a tensor is
// inspected where the host can read it (`values_on_host`); kernels clamp or skip what lies out of range.
#pragma once

#include "operands.h"
#include "specdec/sequences.h"

namespace specdec::binding {

// Rows of a call: how many, and the slot of each. `data` is null where row b is slot b.
struct Rows {
  int64_t B = 0;
  const int32_t* slots = nullptr;  // [B]

  bool padding(int64_t b) const { return slots != nullptr && slots[b] < 0; }
};

// slots int32 [B] must lie inside the pool and must not repeat: two rows writing one slot would corrupt it.
Rows slots_view(const OptionalTensor& slots, int64_t B, int64_t pool, const char* pool_name);

// parents int32 [B, N] of nodes whose ids start at `first`: -1, or an earlier node.
const int32_t* parents_view(const OptionalTensor& parents, const char* name, const Rows& rows, int64_t N,
                            int64_t first, const int32_t* lengths);

// path int32 [B, P] and path_lengths int32 [B] into `nodes` nodes. Nodes are in topological order, so a path
// from root to leaf ascends.
PathView path_view(const OptionalTensor& path, const OptionalTensor& lengths, const char* path_name,
                   const char* lengths_name, const Rows& rows, int64_t nodes);

// A pool whose slots are contiguous; only the first stride is free. A written pool must not overlap itself.
void check_pool(const Tensor& pool, const char* name, Access access);

// No slot of a pool that is written may share memory with an input or with the other pool: what is read would
// then depend on which row is done first. An input counts from its first to its last byte, gaps between
// included. Nothing is asked of a pool that is read.
void check_apart(const Operands& operands);

inline void* pool_data(const Tensor& pool, Access access) {
  return access == Access::kWrite ? pool.mutable_data_ptr() : const_cast<void*>(pool.const_data_ptr());
}

// The slots and the tree of a verification, whose sizes and pool are filled in. `first` is the number of
// prefix nodes.
template <typename Params>
Rows fill_tree(Params& p, const char* pool_name, const OptionalTensor& slots, const OptionalTensor& parents,
               const OptionalTensor& lengths, int64_t first) {
  const Rows rows = slots_view(slots, p.B, p.state.slots, pool_name);
  p.slots = rows.slots;
  p.lengths = int32_or_null(lengths, "lengths", {p.B}, "[B]");
  p.parents = parents_view(parents, "parents", rows, p.N, first, p.lengths);
  return rows;
}

// The path of a deferred verification, whose pending factors are filled in.
template <typename Params>
void fill_pending_path(Params& p, const Rows& rows, const OptionalTensor& path,
                       const OptionalTensor& lengths) {
  p.has_pending = true;
  p.pending_path = path_view(path, lengths, "pending.path", "pending.path_lengths", rows, p.pending.nodes);
}

}  // namespace specdec::binding
