#include "global_shadow.h"

#include <algorithm>

namespace specdec::simt {

void GlobalShadow::check(GlobalConflict& conflict, const Access& other, bool write, uint32_t mask,
                         const GlobalAccessor& accessor) {
  if (other.launch != accessor.launch || (other.bytes & mask) == 0 || conflict.thread >= 0) return;
  const auto thread = static_cast<int>(other.thread);
  const bool same_block = other.block == accessor.block;
  if (same_block &&
      (thread == accessor.in_block.thread || other.epoch <= accessor.in_block.joined[thread / 32])) {
    return;
  }
  if (knows(*accessor.known, other.block, thread, other.epoch)) return;
  conflict.thread = thread;
  conflict.place = other.place;
  conflict.write = write;
  conflict.same_block = same_block;
}

template <bool kWrite>
GlobalConflict GlobalShadow::touch(size_t offset, int bytes, size_t buffer_bytes,
                                   const GlobalAccessor& accessor, uint32_t place) {
  if (granules_.data() == nullptr) granules_ = Reservation((buffer_bytes / 4 + 1) * sizeof(Granule));
  GlobalConflict conflict;
  while (bytes > 0) {
    const int at = static_cast<int>(offset % 4), count = std::min(bytes, 4 - at);
    const uint32_t mask = ((1u << count) - 1) << at;
    Granule& granule = static_cast<Granule*>(granules_.data())[offset / 4];
    const Access mine{accessor.launch,
                      accessor.in_block.epoch,
                      static_cast<uint32_t>(accessor.block),
                      static_cast<uint32_t>(accessor.in_block.thread) & 1023u,
                      mask & 15u,
                      place & 0x3ffffu};
    check(conflict, granule.write, true, mask, accessor);
    if constexpr (kWrite) {
      check(conflict, granule.read, false, mask, accessor);
      granule.write = mine;
    } else {
      granule.read = mine;
    }
    offset += static_cast<size_t>(count);
    bytes -= count;
  }
  return conflict;
}

GlobalConflict GlobalShadow::read(size_t offset, int bytes, size_t buffer_bytes,
                                  const GlobalAccessor& accessor, uint32_t place) {
  return touch<false>(offset, bytes, buffer_bytes, accessor, place);
}

GlobalConflict GlobalShadow::write(size_t offset, int bytes, size_t buffer_bytes,
                                   const GlobalAccessor& accessor, uint32_t place) {
  return touch<true>(offset, bytes, buffer_bytes, accessor, place);
}

}  // namespace specdec::simt
