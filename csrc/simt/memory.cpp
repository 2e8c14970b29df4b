#include "memory.h"

#include <stdexcept>
#include <utility>

namespace specdec::simt {

Buffer::Buffer(std::string name, const void* data, size_t bytes, Direction direction)
    : name_(std::move(name)),
      begin_(reinterpret_cast<uintptr_t>(data)),
      end_(begin_ + bytes),
      direction_(direction) {}

void Buffer::set_values(uintptr_t address, size_t bytes) {
  if (direction_ == Direction::kOutput || flipped_.data() != nullptr) {
    mark(address, bytes, direction_ == Direction::kOutput);
  }
}

void Buffer::clear_values(uintptr_t address, size_t bytes) {
  if (direction_ != Direction::kOutput || flipped_.data() != nullptr) {
    mark(address, bytes, direction_ != Direction::kOutput);
  }
}

void Buffer::mark(uintptr_t address, size_t bytes, bool flipped) {
  // The four bytes more are what window() may read past the end.
  if (flipped_.data() == nullptr) flipped_ = Reservation((end_ - begin_) / 8 + 1 + sizeof(uint32_t));
  auto* bits = static_cast<unsigned char*>(flipped_.data());
  size_t offset = address - begin_;
  while (bytes > 0) {
    const size_t count = bytes < 8 - offset % 8 ? bytes : 8 - offset % 8;
    const auto part = static_cast<unsigned char>(mask(count) << (offset % 8));
    bits[offset / 8] =
        static_cast<unsigned char>(flipped ? bits[offset / 8] | part : bits[offset / 8] & ~part);
    offset += count;
    bytes -= count;
  }
}

int64_t Buffer::bytes_with_values() const {
  const auto bytes = static_cast<int64_t>(end_ - begin_);
  int64_t flipped = 0;
  if (flipped_.data() != nullptr) {
    const auto* bits = static_cast<const unsigned char*>(flipped_.data());
    for (int64_t i = 0; i <= bytes / 8; ++i) flipped += __builtin_popcount(bits[i]);
  }
  return direction_ == Direction::kOutput ? flipped : bytes - flipped;
}

Buffer& Memory::add(std::string name, const void* data, size_t bytes, Direction direction) {
  Buffer buffer(std::move(name), data, data != nullptr ? bytes : 0, direction);
  for (const Buffer& other : buffers_) {
    if (buffer.begin() < other.end() && other.begin() < buffer.end()) {
      throw std::invalid_argument("simt: " + buffer.name() + " overlaps " + other.name());
    }
  }
  buffers_.push_back(std::move(buffer));
  return buffers_.back();
}

Buffer* Memory::find(uintptr_t address) {
  if (last_ != nullptr && last_->contains(address, 1)) return last_;
  for (Buffer& buffer : buffers_) {
    if (buffer.contains(address, 1)) return last_ = &buffer;
  }
  return nullptr;
}

Buffer& Memory::at(const std::string& name) {
  for (Buffer& buffer : buffers_) {
    if (buffer.name() == name) return buffer;
  }
  throw std::out_of_range("simt: no buffer is called " + name);
}

void Memory::clear() {
  buffers_.clear();
  last_ = nullptr;
}

}  // namespace specdec::simt
