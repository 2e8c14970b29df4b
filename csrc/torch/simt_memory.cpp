#include "simt_memory.h"

#include <algorithm>
#include <functional>

namespace specdec::binding {

namespace {

struct Extent {
  uintptr_t begin = 0, end = 0;
};

uintptr_t address_of(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()); }

// From the first to behind the last element.
Extent extent_of(const Tensor& t) {
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return {address_of(t), address_of(t) + static_cast<uintptr_t>(last + 1) * t.element_size()};
}

// f(address, bytes) for every run of elements of the dimensions from d on.
void visit_runs(const Tensor& t, int64_t d, uintptr_t at, const std::function<void(uintptr_t, size_t)>& f) {
  const auto item = static_cast<int64_t>(t.element_size());
  int64_t run = 1;  // elements of the dimensions from d on, where they are contiguous
  bool contiguous = true;
  for (int64_t i = t.dim() - 1; i >= d; --i) {
    contiguous = contiguous && (t.size(i) == 1 || t.stride(i) == run);
    run *= t.size(i);
  }
  if (contiguous) return f(at, static_cast<size_t>(run * item));
  for (int64_t i = 0; i < t.size(d); ++i) {
    visit_runs(t, d + 1, at + static_cast<uintptr_t>(i * t.stride(d) * item), f);
  }
}

}  // namespace

CallMemory::CallMemory(simt::Memory& memory, const Operands& operands, NamedTensors outputs,
                       std::initializer_list<Scratch> scratch) {
  std::vector<Named> tensors;
  const auto take = [&](const Named& named) {
    if (named.tensor != nullptr && named.tensor->numel() > 0) tensors.push_back(named);
  };
  for (const Named& input : operands.inputs) take(input);
  for (const Named& pool : operands.pools) take(pool);
  const auto is_pool = [&](const Named& named) {
    return named.tensor == operands.pools[0].tensor || named.tensor == operands.pools[1].tensor;
  };
  std::stable_sort(tensors.begin(), tensors.end(), [](const Named& a, const Named& b) {
    return address_of(*a.tensor) < address_of(*b.tensor);
  });
  for (size_t i = 0; i < tensors.size();) {
    uintptr_t end = extent_of(*tensors[i].tensor).end;
    size_t j = i;
    bool written = false;
    for (; j < tensors.size() && (j == i || address_of(*tensors[j].tensor) < end); ++j) {
      end = std::max(end, extent_of(*tensors[j].tensor).end);
      written = written || (is_pool(tensors[j]) && operands.access == Access::kWrite);
    }
    add(memory, &tensors[i], &tensors[i] + (j - i),
        written ? simt::Direction::kBoth : simt::Direction::kInput);
    i = j;
  }
  for (const Named& output : outputs) {
    if (output.tensor == nullptr || output.tensor->numel() == 0) continue;
    add(memory, &output, &output + 1, simt::Direction::kOutput);
  }
  for (const Scratch& s : scratch) {
    if (s.bytes > 0) memory.add(s.name, static_cast<const void*>(s.data), s.bytes, s.direction);
  }
}

// Tensors of ascending addresses that overlap.
void CallMemory::add(simt::Memory& memory, const Named* first, const Named* last, simt::Direction direction) {
  Extent all = extent_of(*first->tensor);
  std::string name;
  for (const Named* named = first; named != last; ++named) {
    name += (name.empty() ? "" : "+") + std::string(named->name);
    all.end = std::max(all.end, extent_of(*named->tensor).end);
  }
  const size_t size = all.end - all.begin;
  std::vector<bool> used(size);
  for (const Named* named = first; named != last; ++named) {
    visit_runs(*named->tensor, 0, address_of(*named->tensor), [&](uintptr_t at, size_t bytes) {
      std::fill_n(used.begin() + static_cast<ptrdiff_t>(at - all.begin), bytes, true);
    });
  }
  simt::Buffer& buffer = memory.add(name, reinterpret_cast<const void*>(all.begin), size, direction);
  int64_t values = 0;
  for (size_t i = 0; i < size;) {
    const size_t begin = i;
    while (i < size && used[i] == used[begin]) ++i;
    if (used[begin]) {
      values += static_cast<int64_t>(i - begin);
    } else if (direction != simt::Direction::kOutput) {
      buffer.clear_values(all.begin + begin, i - begin);
    }
  }
  buffers_.push_back({&buffer, values});
}

std::string CallMemory::written_wrongly() const {
  std::string text;
  for (const Buffer& b : buffers_) {
    if (b.buffer->direction() == simt::Direction::kInput) continue;
    const int64_t values = b.buffer->bytes_with_values();
    if (values == b.values) continue;
    text += b.buffer->name() + ": " +
            (values < b.values ? std::to_string(b.values - values) + " bytes were not written"
                               : std::to_string(values - b.values) + " bytes between slots were written") +
            "\n";
  }
  return text;
}

}  // namespace specdec::binding
