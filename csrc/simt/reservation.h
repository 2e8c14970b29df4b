#pragma once

#include <cstddef>

namespace specdec::simt {

// Address space that costs only the pages that are touched: a pool beyond 2^31 elements, or one bit a byte.
class Reservation {
 public:
  Reservation() = default;
  explicit Reservation(size_t bytes);  // reads as zeros
  ~Reservation();
  Reservation(Reservation&& other) noexcept;
  Reservation& operator=(Reservation&& other) noexcept;

  void* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace specdec::simt
