// The primitives of csrc/cuda/primitives.cuh as the executor has them. Included by that header only.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "access.h"
#include "kernel.h"
#include "numbers.h"
#include "where.h"

namespace specdec::cuda {

using simt::bfloat16;
using simt::half;
using simt::Where;

// --- where a thread is ---

inline int thread() { return simt::thread_index(); }
inline int lane() { return thread() % 32; }
inline int warp() { return thread() / 32; }
inline Index3 block() { return simt::block_index(); }
inline Index3 blocks() { return simt::grid_size(); }

// --- global memory ---

template <typename T>
class Global {
 public:
  using Value = std::remove_const_t<T>;

  Global() = default;
  explicit Global(T* pointer) : pointer_(pointer), buffer_(simt::find_buffer(pointer)) {}
  template <typename U, typename = std::enable_if_t<std::is_same_v<const U, T>>>
  Global(const Global<U>& other) : pointer_(other.pointer_), buffer_(other.buffer_) {}

  Global operator+(int64_t n) const { return Global(pointer_ + n, buffer_); }
  explicit operator bool() const { return pointer_ != nullptr; }

  Value load(int64_t i, Where where = Where::here()) const {
    Value value{};
    if (simt::read_global(buffer_, pointer_ + i, sizeof(T), where))
      std::memcpy(&value, pointer_ + i, sizeof(T));
    return value;
  }
  void store(int64_t i, Value value, Where where = Where::here()) const {
    if (simt::write_global(buffer_, pointer_ + i, sizeof(T), where)) pointer_[i] = value;
  }
  template <int N>
  Pack<Value, N> load_vec(int64_t i, Where where = Where::here()) const {
    static_assert(is_vector_size(N * sizeof(T)));
    Pack<Value, N> pack{};
    if (simt::read_global(buffer_, pointer_ + i, sizeof(pack), where))
      std::memcpy(&pack, pointer_ + i, sizeof(pack));
    return pack;
  }
  template <int N>
  void store_vec(int64_t i, const Pack<Value, N>& pack, Where where = Where::here()) const {
    static_assert(is_vector_size(N * sizeof(T)));
    if (simt::write_global(buffer_, pointer_ + i, sizeof(pack), where))
      std::memcpy(pointer_ + i, &pack, sizeof(pack));
  }

  int32_t load_acquire(int64_t i, Where where = Where::here()) const {
    static_assert(std::is_same_v<Value, int32_t>);
    return simt::acquire_global(buffer_, pointer_ + i, where) ? pointer_[i] : 0;
  }
  void store_release(int64_t i, int32_t value, Where where = Where::here()) const {
    static_assert(std::is_same_v<T, int32_t>);
    if (simt::release_global(buffer_, pointer_ + i, false, where)) pointer_[i] = value;
  }
  Value atomic_add(int64_t i, Value value, Where where = Where::here()) const {
    static_assert(std::is_same_v<T, int32_t> || std::is_same_v<T, float>);
    if (!simt::release_global(buffer_, pointer_ + i, true, where)) return Value{};
    const Value before = pointer_[i];
    pointer_[i] = before + value;
    return before;
  }

 private:
  template <typename>
  friend class Global;
  template <int N, typename S, typename U>
  friend void copy_async(const S&, int64_t, const Global<U>&, int64_t, bool, Where);
  Global(T* pointer, simt::Buffer* buffer) : pointer_(pointer), buffer_(buffer) {}

  T* pointer_ = nullptr;
  simt::Buffer* buffer_ = nullptr;  // where the pointer came from: it must stay there
};

// --- shared memory ---

template <typename T>
class Shared {
 public:
  using Value = T;

  Shared() = default;
  Shared(simt::SharedRange range, int64_t offset) : range_(range), offset_(offset) {}

  Shared operator+(int64_t n) const { return Shared(range_, at(n)); }

  T load(int64_t i, Where where = Where::here()) const {
    T value{};
    if (const void* from = simt::read_shared(range_, at(i), sizeof(T), where))
      std::memcpy(&value, from, sizeof(T));
    return value;
  }
  void store(int64_t i, T value, Where where = Where::here()) const {
    if (void* to = simt::write_shared(range_, at(i), sizeof(T), where)) std::memcpy(to, &value, sizeof(T));
  }
  template <int N>
  Pack<T, N> load_vec(int64_t i, Where where = Where::here()) const {
    static_assert(is_vector_size(N * sizeof(T)));
    Pack<T, N> pack{};
    if (const void* from = simt::read_shared(range_, at(i), sizeof(pack), where))
      std::memcpy(&pack, from, sizeof(pack));
    return pack;
  }
  template <int N>
  void store_vec(int64_t i, const Pack<T, N>& pack, Where where = Where::here()) const {
    static_assert(is_vector_size(N * sizeof(T)));
    if (void* to = simt::write_shared(range_, at(i), sizeof(pack), where))
      std::memcpy(to, &pack, sizeof(pack));
  }

 private:
  template <int N, typename S, typename U>
  friend void copy_async(const S&, int64_t, const Global<U>&, int64_t, bool, Where);
  template <int N, typename U>
  friend void load_matrix(uint32_t (&)[N], const Shared<U>&, int64_t, Where);
  template <int N, typename U>
  friend void load_matrix_transposed(uint32_t (&)[N], const Shared<U>&, int64_t, Where);
  int64_t at(int64_t i) const { return offset_ + i * static_cast<int64_t>(sizeof(T)); }

  simt::SharedRange range_;
  int64_t offset_ = 0;
};

class SharedArena {
 public:
  template <typename T>
  Shared<T> take(int64_t count, Where where = Where::here()) {
    const simt::SharedRange range = simt::take_shared(used_, count * static_cast<int64_t>(sizeof(T)), where);
    used_ = range.end;
    return Shared<T>(range, range.begin);
  }

 private:
  int64_t used_ = 0;
};

template <int N, typename S, typename U>
void copy_async(const S& to, int64_t i, const Global<U>& from, int64_t j, bool valid = true,
                Where where = Where::here()) {
  static_assert(std::is_same_v<typename S::Value, typename Global<U>::Value>);
  static_assert(is_vector_size(N * sizeof(U)));
  simt::copy_async(to.range_, to.at(i), from.buffer_, from.pointer_ + j, N * sizeof(U), valid, where);
}
inline void copy_async_commit() { simt::copy_async_commit(); }
template <int N>
void copy_async_wait() {
  simt::copy_async_wait(N);
}

// --- waits ---

inline void barrier(Where where = Where::here()) { simt::block_barrier(where); }
inline void barrier(int id, int threads, Where where = Where::here()) { simt::barrier(id, threads, where); }
inline void warp_barrier(Where where = Where::here()) { simt::warp_barrier(where); }
inline void fence() { simt::fence(); }

// --- warps ---

template <typename T>
T shuffle(T x, int source_lane, Where where = Where::here()) {
  static_assert(std::is_same_v<T, int32_t> || std::is_same_v<T, uint32_t> || std::is_same_v<T, float>);
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  bits = simt::shuffle(bits, source_lane, where);
  std::memcpy(&x, &bits, sizeof(bits));
  return x;
}
template <typename T>
T shuffle_xor(T x, int mask, Where where = Where::here()) {
  return shuffle(x, lane() ^ mask, where);
}
template <typename T>
T shuffle_down(T x, int n, Where where = Where::here()) {
  const int source = lane() + n;
  return shuffle(x, source < 32 ? source : lane(), where);
}
inline uint32_t ballot(bool predicate, Where where = Where::here()) { return simt::ballot(predicate, where); }
inline bool any(bool predicate, Where where = Where::here()) { return simt::ballot(predicate, where) != 0; }
inline bool all(bool predicate, Where where = Where::here()) { return simt::ballot(!predicate, where) == 0; }

// --- tensor cores ---

inline void mma_tf32(float (&d)[4], const float (&a)[4], const float (&b)[2], Where where = Where::here()) {
  simt::mma_tf32(d, a, b, where);
}
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                     Where where = Where::here()) {
  simt::mma_bf16(d, a, b, where);
}
template <int N, typename U>
void load_matrix(uint32_t (&r)[N], const Shared<U>& s, int64_t i, Where where = Where::here()) {
  static_assert(sizeof(U) == 2 && (N == 1 || N == 2 || N == 4));
  simt::load_matrix(r, N, false, s.range_, s.at(i), where);
}
template <int N, typename U>
void load_matrix_transposed(uint32_t (&r)[N], const Shared<U>& s, int64_t i, Where where = Where::here()) {
  static_assert(sizeof(U) == 2 && (N == 1 || N == 2 || N == 4));
  simt::load_matrix(r, N, true, s.range_, s.at(i), where);
}

// --- arithmetic ---

inline float fma(float a, float b, float c) { return std::fma(a, b, c); }
inline float exp(float x) { return std::exp(x); }
inline float log1p(float x) { return std::log1p(x); }
inline float sqrt(float x) { return std::sqrt(x); }
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
inline float to_tf32(float x) {
  const uint32_t bits = simt::bits_of(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) return x;
  return simt::float_of_bits((bits + 0x1000u) & 0xffffe000u);  // to nearest, ties away from zero
}

inline float float_of(float x) { return x; }
inline float float_of(bfloat16 x) { return simt::to_float(x); }
inline float float_of(half x) { return simt::to_float(x); }

template <typename T>
T round_to(float x) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    return simt::to_bfloat16(x);
  } else if constexpr (std::is_same_v<T, half>) {
    return simt::to_half(x);
  } else {
    static_assert(std::is_same_v<T, float>);
    return x;
  }
}
// Two bfloat16 in a register of mma_bf16; `low` is the one with the smaller column.
inline uint32_t pack_bf16(float low, float high) {
  return simt::to_bfloat16(low).bits | static_cast<uint32_t>(simt::to_bfloat16(high).bits) << 16;
}

}  // namespace specdec::cuda
