// The primitives that kernels are written with: threads, memory, waits, warps, tensor cores and the
// arithmetic that is not plain C++. docs/cuda.md lists them. For a GPU each is one instruction, and no other
// file has inline PTX; for the executor they come from csrc/simt/primitives.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel.h"

#ifdef SPECDEC_SIMT
#define SPECDEC_DEVICE inline
#define SPECDEC_HOST_DEVICE inline
#define SPECDEC_UNROLL
#define SPECDEC_UNROLL_BY(n)
#define SPECDEC_ROLL
#else
#define SPECDEC_DEVICE __device__ __forceinline__
#define SPECDEC_HOST_DEVICE __host__ __device__ __forceinline__
#define SPECDEC_UNROLL _Pragma("unroll")  // before a loop whose index picks registers
#define SPECDEC_PRAGMA(text) _Pragma(#text)
#define SPECDEC_UNROLL_BY(n) SPECDEC_PRAGMA(unroll n)
// Before a loop that gains nothing from more copies of its body, which nvcc makes unasked.
#define SPECDEC_ROLL SPECDEC_UNROLL_BY(1)
#endif

namespace specdec::cuda {

// N elements that are loaded or stored at once.
template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {
  T x[N];

  SPECDEC_HOST_DEVICE T& operator[](int i) { return x[i]; }
  SPECDEC_HOST_DEVICE const T& operator[](int i) const { return x[i]; }
};

constexpr bool is_vector_size(size_t bytes) { return bytes == 4 || bytes == 8 || bytes == 16; }

}  // namespace specdec::cuda

#ifdef SPECDEC_SIMT
#include "../simt/primitives.h"
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace specdec::cuda {

using bfloat16 = __nv_bfloat16;
using half = __half;

// --- where a thread is ---

SPECDEC_DEVICE int thread() { return static_cast<int>(threadIdx.x); }
SPECDEC_DEVICE int lane() { return thread() % 32; }
SPECDEC_DEVICE int warp() { return thread() / 32; }
SPECDEC_DEVICE Index3 block() {
  return {static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(blockIdx.y),
          static_cast<int32_t>(blockIdx.z)};
}
SPECDEC_DEVICE Index3 blocks() {
  return {static_cast<int32_t>(gridDim.x), static_cast<int32_t>(gridDim.y), static_cast<int32_t>(gridDim.z)};
}

namespace detail {

template <size_t Bytes>
struct Word;
template <>
struct Word<4> {
  using Type = uint32_t;
};
template <>
struct Word<8> {
  using Type = uint2;
};
template <>
struct Word<16> {
  using Type = uint4;
};

// One access whatever the elements are: the compiler would split a struct of eight bfloat16.
template <int N, typename T>
SPECDEC_DEVICE Pack<T, N> load(const T* from) {
  using Type = typename Word<N * sizeof(T)>::Type;
  const Type word = *reinterpret_cast<const Type*>(from);
  Pack<T, N> pack;
  __builtin_memcpy(&pack, &word, sizeof(pack));
  return pack;
}
template <int N, typename T>
SPECDEC_DEVICE void store(T* to, const Pack<T, N>& pack) {
  using Type = typename Word<N * sizeof(T)>::Type;
  Type word;
  __builtin_memcpy(&word, &pack, sizeof(pack));
  *reinterpret_cast<Type*>(to) = word;
}

SPECDEC_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace detail

// --- global memory ---

template <typename T>
class Global {
 public:
  using Value = std::remove_const_t<T>;

  Global() = default;
  SPECDEC_DEVICE explicit Global(T* pointer) : pointer_(pointer) {}
  template <typename U, typename = std::enable_if_t<std::is_same_v<const U, T> > >
  SPECDEC_DEVICE Global(const Global<U>& other) : pointer_(other.pointer_) {}

  SPECDEC_DEVICE Global operator+(int64_t n) const { return Global(pointer_ + n); }
  SPECDEC_DEVICE explicit operator bool() const { return pointer_ != nullptr; }

  SPECDEC_DEVICE Value load(int64_t i) const { return pointer_[i]; }
  SPECDEC_DEVICE void store(int64_t i, Value value) const { pointer_[i] = value; }
  template <int N>
  SPECDEC_DEVICE Pack<Value, N> load_vec(int64_t i) const {
    static_assert(is_vector_size(N * sizeof(T)));
    return detail::load<N, Value>(pointer_ + i);
  }
  template <int N>
  SPECDEC_DEVICE void store_vec(int64_t i, const Pack<Value, N>& pack) const {
    static_assert(is_vector_size(N * sizeof(T)));
    detail::store<N, Value>(pointer_ + i, pack);
  }

  SPECDEC_DEVICE int32_t load_acquire(int64_t i) const {
    static_assert(std::is_same_v<Value, int32_t>);
    int32_t value;
    asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(value) : "l"(pointer_ + i) : "memory");
    return value;
  }
  SPECDEC_DEVICE void store_release(int64_t i, int32_t value) const {
    static_assert(std::is_same_v<T, int32_t>);
    asm volatile("st.release.gpu.s32 [%0], %1;" ::"l"(pointer_ + i), "r"(value) : "memory");
  }
  SPECDEC_DEVICE Value atomic_add(int64_t i, Value value) const {
    static_assert(std::is_same_v<T, int32_t> || std::is_same_v<T, float>);
    return atomicAdd(pointer_ + i, value);
  }
  SPECDEC_DEVICE T* pointer() const { return pointer_; }  // for the primitives below

 private:
  template <typename>
  friend class Global;

  T* pointer_ = nullptr;
};

// --- shared memory ---

template <typename T>
class Shared {
 public:
  using Value = T;

  Shared() = default;
  SPECDEC_DEVICE explicit Shared(T* pointer) : pointer_(pointer) {}

  SPECDEC_DEVICE Shared operator+(int64_t n) const { return Shared(pointer_ + n); }

  SPECDEC_DEVICE T load(int64_t i) const { return pointer_[i]; }
  SPECDEC_DEVICE void store(int64_t i, T value) const { pointer_[i] = value; }
  template <int N>
  SPECDEC_DEVICE Pack<T, N> load_vec(int64_t i) const {
    static_assert(is_vector_size(N * sizeof(T)));
    return detail::load<N, T>(pointer_ + i);
  }
  template <int N>
  SPECDEC_DEVICE void store_vec(int64_t i, const Pack<T, N>& pack) const {
    static_assert(is_vector_size(N * sizeof(T)));
    detail::store<N, T>(pointer_ + i, pack);
  }
  SPECDEC_DEVICE T* pointer() const { return pointer_; }  // for the primitives below

 private:
  T* pointer_ = nullptr;
};

class SharedArena {
 public:
  SPECDEC_DEVICE explicit SharedArena(char* base) : base_(base) {}

  template <typename T>
  SPECDEC_DEVICE Shared<T> take(int64_t count) {
    const int64_t begin = (used_ + 15) / 16 * 16;
    used_ = begin + count * static_cast<int64_t>(sizeof(T));
    return Shared<T>(reinterpret_cast<T*>(base_ + begin));
  }

 private:
  char* base_;
  int64_t used_ = 0;
};

template <int N, typename S, typename U>
SPECDEC_DEVICE void copy_async(const S& to, int64_t i, const Global<U>& from, int64_t j, bool valid = true) {
  static_assert(std::is_same_v<typename S::Value, typename Global<U>::Value>);
  constexpr int kBytes = N * sizeof(U);
  static_assert(is_vector_size(kBytes));
  const uint32_t target = detail::shared_address(to.pointer() + i);
  const void* source = from.pointer() + j;
  const int bytes = valid ? kBytes : 0;  // the rest is filled with zeros
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source), "n"(kBytes),
                 "r"(bytes)
                 : "memory");
  }
}
SPECDEC_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
SPECDEC_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// --- waits ---

SPECDEC_DEVICE void barrier() { __syncthreads(); }
SPECDEC_DEVICE void barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
SPECDEC_DEVICE void warp_barrier() { __syncwarp(); }
SPECDEC_DEVICE void fence() { __threadfence(); }

// --- warps ---

constexpr uint32_t kAllLanes = 0xffffffffu;

template <typename T>
SPECDEC_DEVICE T shuffle(T x, int source_lane) {
  return __shfl_sync(kAllLanes, x, source_lane);
}
template <typename T>
SPECDEC_DEVICE T shuffle_xor(T x, int mask) {
  return __shfl_xor_sync(kAllLanes, x, mask);
}
template <typename T>
SPECDEC_DEVICE T shuffle_down(T x, int n) {
  return __shfl_down_sync(kAllLanes, x, static_cast<unsigned>(n));
}
SPECDEC_DEVICE uint32_t ballot(bool predicate) { return __ballot_sync(kAllLanes, predicate); }
SPECDEC_DEVICE bool any(bool predicate) { return __any_sync(kAllLanes, predicate) != 0; }
SPECDEC_DEVICE bool all(bool predicate) { return __all_sync(kAllLanes, predicate) != 0; }

// --- operands of the tensor cores (their products: tensor_cores.cuh) ---

template <int N, typename U>
SPECDEC_DEVICE void load_matrix(uint32_t (&r)[N], const Shared<U>& s, int64_t i) {
  static_assert(sizeof(U) == 2 && (N == 1 || N == 2 || N == 4));
  const uint32_t row = detail::shared_address(s.pointer() + i);
  if constexpr (N == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(row) : "memory");
  } else if constexpr (N == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(row)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
  }
}
template <int N, typename U>
SPECDEC_DEVICE void load_matrix_transposed(uint32_t (&r)[N], const Shared<U>& s, int64_t i) {
  static_assert(sizeof(U) == 2 && (N == 1 || N == 2 || N == 4));
  const uint32_t row = detail::shared_address(s.pointer() + i);
  if constexpr (N == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(row)
                 : "memory");
  } else if constexpr (N == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(row)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
  }
}

// --- arithmetic ---

SPECDEC_DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
SPECDEC_DEVICE float exp(float x) { return expf(x); }
SPECDEC_DEVICE float log1p(float x) { return log1pf(x); }
SPECDEC_DEVICE float sqrt(float x) { return sqrtf(x); }
SPECDEC_DEVICE float rsqrt(float x) { return rsqrtf(x); }
SPECDEC_DEVICE float to_tf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
}

SPECDEC_DEVICE float float_of(float x) { return x; }
SPECDEC_DEVICE float float_of(bfloat16 x) { return __bfloat162float(x); }
SPECDEC_DEVICE float float_of(half x) { return __half2float(x); }

template <typename T>
SPECDEC_DEVICE T round_to(float x) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    return __float2bfloat16_rn(x);
  } else if constexpr (std::is_same_v<T, half>) {
    return __float2half_rn(x);
  } else {
    static_assert(std::is_same_v<T, float>);
    return x;
  }
}
// Two bfloat16 in a register of mma_bf16; `low` is the one with the smaller column.
SPECDEC_DEVICE uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  __builtin_memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

}  // namespace specdec::cuda

#endif
