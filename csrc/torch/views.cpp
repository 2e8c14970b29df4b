#include "views.h"

#include <algorithm>

#include "backend.h"
#include "specdec/tree.h"

namespace specdec::binding {

namespace {

void check_distinct(const int32_t* slots, int64_t B) {
  if (B < 2) return;
  std::vector<int32_t> used;
  for (int64_t b = 0; b < B; ++b) {
    if (slots[b] >= 0) used.push_back(slots[b]);
  }
  std::sort(used.begin(), used.end());
  const auto twice = std::adjacent_find(used.begin(), used.end());
  STD_TORCH_CHECK(twice == used.end(), "slots: slot ", *twice, " is named by two rows, want distinct slots");
}

// No slot of the pool shares memory with `other`.
void check_apart(const Named& pool_argument, const Named& other) {
  if (pool_argument.tensor == nullptr || other.tensor == nullptr) return;
  const Tensor& pool = *pool_argument.tensor;
  const Tensor& t = *other.tensor;
  const int64_t elements = pool.numel();
  if (elements == 0) return;
  const int64_t item = static_cast<int64_t>(pool.element_size());
  const int64_t count = pool.size(0);
  const int64_t slot = elements / count * item;  // bytes of one slot
  const int64_t stride = std::max<int64_t>(pool.stride(0) * item, 1);
  const int64_t begin =
      reinterpret_cast<intptr_t>(t.const_data_ptr()) - reinterpret_cast<intptr_t>(pool.const_data_ptr());
  if (begin >= (count - 1) * stride + slot) return;
  const auto sizes = t.sizes();
  const auto strides = t.strides();
  const int64_t other_item = static_cast<int64_t>(t.element_size());
  bool empty = false;
  int64_t last = 0, last_of_row = 0;  // offset of its last element, and of row 0's
  for (size_t d = 0; d < sizes.size(); ++d) {
    empty = empty || sizes[d] == 0;
    last += (sizes[d] - 1) * strides[d];
    if (d > 0) last_of_row += (sizes[d] - 1) * strides[d];
  }
  const int64_t end = begin + (last + 1) * other_item;
  if (empty || end <= 0) return;
  if (!sizes.empty() && strides[0] * other_item == stride) {
    // Two pools in one buffer, a block a slot: its rows may lie between the slots.
    const int64_t offset = (begin % stride + stride) % stride;
    if (offset >= slot && offset + (last_of_row + 1) * other_item <= stride) return;
  }
  const int64_t first = begin < slot ? 0 : (begin - slot) / stride + 1;  // first slot that ends after begin
  STD_TORCH_CHECK(first * stride >= end, other.name, ": got a tensor that shares memory with ",
                  pool_argument.name, ", which is written, want memory of its own (call .clone())");
}

}  // namespace

Rows slots_view(const OptionalTensor& slots, int64_t B, int64_t pool, const char* pool_name) {
  Rows rows{B, int32_or_null(slots, "slots", {B}, "[B]")};
  if (!slots.has_value()) {
    STD_TORCH_CHECK(B == pool, "slots: got None with ", B, " rows and ", pool, " slots in ", pool_name,
                    ", want one slot a row (pass slots)");
    return rows;
  }
  if (!values_on_host()) return rows;
  for (int64_t b = 0; b < B; ++b) {
    STD_TORCH_CHECK(rows.slots[b] < pool, "slots: row ", b, " is ", rows.slots[b], ", want less than the ",
                    pool, " slots of ", pool_name);
  }
  check_distinct(rows.slots, B);
  return rows;
}

const int32_t* parents_view(const OptionalTensor& parents, const char* name, const Rows& rows, int64_t N,
                            int64_t first, const int32_t* lengths) {
  const int32_t* data = int32_or_null(parents, name, {rows.B, N}, "[B, N]");
  if (data == nullptr || !values_on_host()) return data;
  for (int64_t b = 0; b < rows.B; ++b) {
    if (rows.padding(b)) continue;
    const TreeError error = check_parents(data + b * N, valid_length(lengths, b, N), first);
    if (error.ok()) continue;
    char text[96];
    error.format(text, sizeof(text));
    STD_TORCH_CHECK(false, name, ": row ", b, " node ", error.node, " ", std::string(text));
  }
  return data;
}

PathView path_view(const OptionalTensor& path, const OptionalTensor& lengths, const char* path_name,
                   const char* lengths_name, const Rows& rows, int64_t nodes) {
  PathView view;
  view.path = int32_or_null(path, path_name, {rows.B, -1}, "[B, P]");
  view.max_length = path.has_value() ? path->size(1) : nodes;
  view.lengths = int32_or_null(lengths, lengths_name, {rows.B}, "[B]");
  if (view.path == nullptr || !values_on_host()) return view;
  for (int64_t b = 0; b < rows.B; ++b) {
    if (rows.padding(b)) continue;
    const int64_t length = valid_length(view.lengths, b, view.max_length);
    int32_t before = -1;
    for (int64_t i = 0; i < length; ++i) {
      const int32_t node = view.path[b * view.max_length + i];
      STD_TORCH_CHECK(node >= 0 && node < nodes, path_name, ": row ", b, " entry ", i, " is ", node,
                      ", want a node in [0, ", nodes, ")");
      STD_TORCH_CHECK(node > before, path_name, ": row ", b, " entry ", i, " is ", node, " after ", before,
                      ", want a path from root to leaf, whose nodes ascend");
      before = node;
    }
  }
  return view;
}

void check_pool(const Tensor& pool, const char* name, Access access) {
  int64_t slot = 1;  // elements of one slot
  for (int64_t d = pool.dim() - 1; d >= 1; --d) {
    STD_TORCH_CHECK(pool.size(d) <= 1 || pool.stride(d) == slot, name, ": dimension ", d, " has stride ",
                    pool.stride(d), ", want ", slot,
                    ": every slot is contiguous (only the slot stride is free)");
    slot *= pool.size(d);
  }
  STD_TORCH_CHECK(access == Access::kRead || pool.size(0) <= 1 || pool.stride(0) >= slot, name,
                  ": the slot stride is ", pool.stride(0), ", want at least ", slot,
                  ": slots that overlap cannot be written");
}

void check_apart(const Operands& operands) {
  if (operands.access == Access::kRead) return;
  const auto& [first, second] = operands.pools;
  for (const Named& input : operands.inputs) {
    check_apart(first, input);
    check_apart(second, input);
  }
  check_apart(first, second);
}

}  // namespace specdec::binding
