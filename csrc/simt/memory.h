// Global memory as the executor knows it: buffers that a test registers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

#include "global_shadow.h"
#include "reservation.h"

namespace specdec::simt {

enum class Direction {
  kInput,   // holds values; must not be written
  kOutput,  // holds none: only what was written may be read. Workspaces, too.
  kBoth,    // holds values; may be written
};

constexpr size_t kSectorBytes = 32;

// Sectors of a buffer, counted from its beginning.
class SectorSet {
 public:
  void add(size_t sector, size_t buffer_bytes) {
    if (bits_.data() == nullptr) bits_ = Reservation(buffer_bytes / kSectorBytes / 8 + 1);
    unsigned char& byte = static_cast<unsigned char*>(bits_.data())[sector / 8];
    const auto bit = static_cast<unsigned char>(1u << sector % 8);
    count_ += (byte & bit) == 0;
    byte |= bit;
  }
  int64_t size() const { return count_; }

 private:
  Reservation bits_;
  int64_t count_ = 0;
};

// Of one buffer in a launch. An address counts once in a request of a warp, a sector once in all.
struct Traffic {
  int64_t read = 0, written = 0;  // bytes
  SectorSet sectors_read, sectors_written;
};

class Buffer {
 public:
  Buffer(std::string name, const void* data, size_t bytes, Direction direction);

  const std::string& name() const { return name_; }
  uintptr_t begin() const { return begin_; }
  uintptr_t end() const { return end_; }
  Direction direction() const { return direction_; }
  bool contains(uintptr_t address, size_t bytes) const {
    return address >= begin_ && bytes <= end_ - begin_ && address - begin_ <= end_ - begin_ - bytes;
  }

  // Bytes in [address, address + bytes) hold values? At most 16 bytes, within the buffer.
  bool holds_values(uintptr_t address, size_t bytes) const {
    if (flipped_.data() == nullptr) return direction_ != Direction::kOutput;
    const uint32_t flipped = window(address) & mask(bytes);
    return direction_ == Direction::kOutput ? flipped == mask(bytes) : flipped == 0;
  }
  void set_values(uintptr_t address, size_t bytes);    // they do from now on
  void clear_values(uintptr_t address, size_t bytes);  // they do not: padding, or an output to be rewritten
  int64_t bytes_with_values() const;

  mutable Traffic traffic;
  mutable GlobalShadow shadow;

 private:
  static uint32_t mask(size_t bytes) { return (uint32_t{1} << bytes) - 1; }
  uint32_t window(uintptr_t address) const {  // 24 bits or more from this byte's on
    const size_t offset = address - begin_;
    uint32_t bits;
    __builtin_memcpy(&bits, static_cast<const char*>(flipped_.data()) + offset / 8, sizeof(bits));
    return bits >> (offset % 8);
  }
  void mark(uintptr_t address, size_t bytes, bool flipped);

  std::string name_;
  uintptr_t begin_, end_;
  Direction direction_;
  Reservation flipped_;  // one bit a byte: differs from what the direction says; empty: none does
};

class Memory {
 public:
  // Registers `bytes` bytes; none where the pointer is null, as that of an absent argument. Throws
  // std::invalid_argument where the range overlaps another one. The reference stays valid until clear().
  Buffer& add(std::string name, const void* data, size_t bytes, Direction direction);
  template <typename T>
  Buffer& add(std::string name, const T* data, size_t count, Direction direction) {
    return add(std::move(name), static_cast<const void*>(data), count * sizeof(T), direction);
  }

  Buffer* find(uintptr_t address);      // null: nothing is registered there
  Buffer& at(const std::string& name);  // throws std::out_of_range
  const std::deque<Buffer>& buffers() const { return buffers_; }
  void clear();

 private:
  std::deque<Buffer> buffers_;
  Buffer* last_ = nullptr;  // kernels stay in a buffer for a while
};

}  // namespace specdec::simt
