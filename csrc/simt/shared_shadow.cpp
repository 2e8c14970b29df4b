#include "shared_shadow.h"

#include <algorithm>

namespace specdec::simt {

namespace {

constexpr int kGranule = 4;

// Calls f(granule, bytes of it as a mask) for every granule of a range.
template <typename F>
void for_granules(int64_t offset, int bytes, F f) {
  while (bytes > 0) {
    const int at = static_cast<int>(offset % kGranule), count = std::min(bytes, kGranule - at);
    f(offset / kGranule, static_cast<uint8_t>(((1 << count) - 1) << at));
    offset += count;
    bytes -= count;
  }
}

}  // namespace

SharedShadow::SharedShadow(int64_t bytes, int warps)
    : warps_(warps), granules_(static_cast<size_t>((bytes + kGranule - 1) / kGranule)) {
  writes_.resize(granules_.size());
  reads_.resize(granules_.size() * static_cast<size_t>(warps));
}

SharedShadow::Granule& SharedShadow::current(int64_t granule) {
  Granule& g = granules_[static_cast<size_t>(granule)];
  if (g.block != block_) {
    g.block = block_;
    g.values = g.copies = 0;
  }
  return g;
}

void SharedShadow::set_values(int64_t offset, int bytes) {
  for_granules(offset, bytes, [&](int64_t granule, uint8_t mask) { current(granule).values |= mask; });
}

void SharedShadow::add_pending(int64_t offset, int bytes, int count) {
  for_granules(offset, bytes, [&](int64_t granule, uint8_t) {
    Granule& g = current(granule);
    g.copies = static_cast<uint8_t>(g.copies + count);
  });
}

void SharedShadow::split(int64_t granule) {
  Granule& g = granules_[static_cast<size_t>(granule)];
  const auto width = static_cast<size_t>(warps_);
  if (g.bytes < 0) {
    g.bytes = static_cast<int32_t>(writes_.size());
    writes_.resize(writes_.size() + kGranule);
    reads_.resize(reads_.size() + kGranule * width);
  }
  for (int byte = 0; byte < kGranule; ++byte) {
    const auto cell = static_cast<size_t>(g.bytes + byte);
    writes_[cell] = writes_[static_cast<size_t>(granule)];
    std::copy_n(reads_.begin() + granule * warps_, width,
                reads_.begin() + static_cast<int64_t>(cell * width));
  }
  g.split = true;
}

inline Conflict SharedShadow::read_cell(int64_t cell, const Accessor& accessor, uint32_t place) {
  Conflict conflict;
  const Write& last = writes_[static_cast<size_t>(cell)];
  if (last.thread >= 0 && last.thread != accessor.thread && last.epoch > accessor.joined[last.thread / 32]) {
    conflict = {last.thread, last.place, true};
  }
  Read& mine = reads_[static_cast<size_t>(cell * warps_ + accessor.thread / 32)];
  if (mine.epoch != accessor.epoch) mine = {accessor.epoch, 0, place};
  mine.lanes |= uint32_t{1} << (accessor.thread % 32);
  mine.place = place;
  return conflict;
}

inline Conflict SharedShadow::write_cell(int64_t cell, const Accessor& accessor, uint32_t place) {
  Conflict conflict;
  Write& last = writes_[static_cast<size_t>(cell)];
  if (last.thread >= 0 && last.thread != accessor.thread && last.epoch > accessor.joined[last.thread / 32]) {
    conflict = {last.thread, last.place, true};
  }
  const Read* reads = &reads_[static_cast<size_t>(cell * warps_)];
  for (int w = 0; w < warps_; ++w) {
    if (reads[w].epoch <= accessor.joined[w]) continue;
    uint32_t lanes = reads[w].lanes;
    if (w == accessor.thread / 32) lanes &= ~(uint32_t{1} << (accessor.thread % 32));
    if (lanes != 0 && conflict.thread < 0) conflict = {w * 32 + __builtin_ctz(lanes), reads[w].place, false};
  }
  last = {accessor.epoch, place, accessor.thread};
  return conflict;
}

template <bool kWrite>
SharedShadow::Touch SharedShadow::touch(int64_t offset, int bytes, const Accessor& accessor, uint32_t place) {
  Touch result;
  const auto touch_cell = [&](int64_t cell) {
    const Conflict found = kWrite ? write_cell(cell, accessor, place) : read_cell(cell, accessor, place);
    if (result.conflict.thread < 0) result.conflict = found;
  };
  for_granules(offset, bytes, [&](int64_t granule, uint8_t mask) {
    Granule& g = granules_[static_cast<size_t>(granule)];
    const bool current = g.block == block_;
    result.pending = result.pending || (current && g.copies != 0);
    result.unwritten = result.unwritten || !current || (g.values & mask) != mask;
    if (mask != 15 && !g.split) split(granule);
    if (!g.split) return touch_cell(granule);
    for (int byte = 0; byte < kGranule; ++byte) {
      if ((mask >> byte & 1) != 0) touch_cell(g.bytes + byte);
    }
    if (kWrite && mask == 15) {
      // Whatever came before comes before this write, or was reported: the bytes are one again.
      g.split = false;
      writes_[static_cast<size_t>(granule)] = writes_[static_cast<size_t>(g.bytes)];
      std::fill_n(reads_.begin() + granule * warps_, warps_, Read{});
    }
  });
  return result;
}

template SharedShadow::Touch SharedShadow::touch<false>(int64_t, int, const Accessor&, uint32_t);
template SharedShadow::Touch SharedShadow::touch<true>(int64_t, int, const Accessor&, uint32_t);

}  // namespace specdec::simt
