// The sliding window of a short causal convolution, [W-1, C], and what its kernels ask of memory.
#pragma once

#include <type_traits>

#include "device_values.cuh"
#include "specdec/params.h"

namespace specdec::cuda {

// Element types and shapes of a convolution kernel.
template <typename X_, typename S_, int kWidth_, bool kVector_>
struct ConvTraits {
  using X = X_;                           // of inputs and outputs
  using S = S_;                           // of the window: X or float
  static constexpr int kWidth = kWidth_;  // W; 0: up to kMaxConvWidth
  static constexpr bool kVector =
      kVector_;  // every row begins at a multiple of 16 bytes and is whole vectors
};

// N elements: one access where N > 1.
template <int N, typename T>
SPECDEC_DEVICE Pack<std::remove_const_t<T>, N> load_pack(const Global<T>& g, int64_t i) {
  if constexpr (N == 1) {
    return {{g.load(i)}};
  } else {
    return g.template load_vec<N>(i);
  }
}
template <int N, typename T>
SPECDEC_DEVICE void store_pack(const Global<T>& g, int64_t i, const Pack<T, N>& pack) {
  if constexpr (N == 1) {
    g.store(i, pack[0]);
  } else {
    g.template store_vec<N>(i, pack);
  }
}

// Element `count` of a null pointer is null.
template <typename T>
SPECDEC_DEVICE Global<T> offset(T* pointer, int64_t count) {
  return pointer != nullptr ? Global<T>(pointer) + count : Global<T>();
}

// The window of one sequence that moves on by the accepted inputs:
//   window <- the last W-1 rows of (window, inputs along the path), oldest first.
template <typename X, typename S>
struct WindowAdvance {
  Global<S> window;            // [W-1, C]
  Global<const X> inputs;      // [nodes, C] with a free stride; null: nothing is accepted
  Global<const int32_t> path;  // null: 0, 1, 2, ...
  int64_t stride = 0;          // of inputs, in elements
  int64_t nodes = 0;           // of inputs
  int accepted = 0;

  SPECDEC_DEVICE WindowAdvance(const ConvStateView& state, int64_t slot)
      : window(Global<S>(static_cast<S*>(state.data)) + slot * state.slot_stride) {}

  SPECDEC_DEVICE void accept(const ConvInputView& x, const PathView& view, int64_t b) {
    inputs = Global<const X>(static_cast<const X*>(x.x)) + b * x.stride_b;
    stride = x.stride_n;
    path = offset(view.path, b * view.max_length);
    nodes = x.nodes;
    accepted = path_length(view, b, nodes);
  }

  // Channels c .. c + N - 1 of the window by one thread, written back where it moved; keep(row, pack) sees
  // every row. In ascending order a row is read before it is overwritten, and kAtOnce loads are in flight.
  template <int N, typename Keep>
  SPECDEC_DEVICE void columns(int64_t c, int64_t C, int W, const Keep& keep) const {
    constexpr int kAtOnce = 4;
    for (int first = 0; first < W - 1; first += kAtOnce) {
      Pack<S, N> rows[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < W - 1) rows[i] = advanced<N>(first + i, c, C, W);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= W - 1) continue;
        if (accepted > 0) store_pack<N>(window, (first + i) * C + c, rows[i]);
        keep(first + i, rows[i]);
      }
    }
  }

 private:
  template <int N>
  SPECDEC_DEVICE Pack<S, N> advanced(int row, int64_t c, int64_t C, int W) const {
    const int from = row + accepted;
    if (from < W - 1) return load_pack<N>(window, from * C + c);
    const int step = from - (W - 1);
    const int64_t node = path ? path_node(path.load(step), nodes) : step;
    const Pack<X, N> x = load_pack<N>(inputs, node * stride + c);
    if constexpr (std::is_same_v<X, S>) {
      return x;
    } else {
      Pack<S, N> rounded;
#pragma unroll
      for (int i = 0; i < N; ++i) rounded[i] = round_to<S>(float_of(x[i]));
      return rounded;
    }
  }
};

}  // namespace specdec::cuda
