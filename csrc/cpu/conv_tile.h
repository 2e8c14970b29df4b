// The short causal convolution of some nodes and channels, wherever they are wanted:
//
//   y = act(bias + sum_j weight[j] x_j), oldest input first, fused multiply-adds in float32
//
// One path for every shape: a number depends on its W inputs alone, so a stream gives the same bits however
// it is split into calls.
#pragma once

#include <algorithm>
#include <type_traits>

#include "rows.h"
#include "simd_math.h"
#include "specdec/params.h"
#include "specdec/sequences.h"

namespace specdec::cpu::SPECDEC_ISA {

namespace conv {

// Channels of a work item: its taps stay in the first cache beside W rows of input.
constexpr int64_t kTile = 256;

// Weights of a channel tile, one row a tap, padded with zeros to whole vectors.
struct Taps {
  alignas(64) float weight[kMaxConvWidth][kTile];
  alignas(64) float bias[kTile];

  // kW > 0 is the width known at compile time: the transposition then runs in vector shuffles.
  template <int kW>
  void fill(const ConvVerifyParams& p, int64_t begin, int64_t count) {
    const int64_t width = kW > 0 ? kW : p.W;
    const float* w = p.weight + begin * width;  // [count, W]
    for (int64_t c = 0; c < count; ++c) {
      for (int64_t j = 0; j < width; ++j) weight[j][c] = w[c * width + j];
    }
    const int64_t padded = (count + Vec::kWidth - 1) / Vec::kWidth * Vec::kWidth;
    for (int64_t c = 0; c < padded; ++c) bias[c] = p.bias != nullptr && c < count ? p.bias[begin + c] : 0.0f;
    for (int64_t j = 0; j < width; ++j) {
      for (int64_t c = count; c < padded; ++c) weight[j][c] = 0.0f;
    }
  }
};

// Where one of the W inputs of a node lies: in x or the prefix (type X), or in the window (type S).
struct InputRow {
  const void* data;
  bool in_window;
};

// The inputs of the nodes of row b, at channel `begin`. Ids run over the prefix first. `accepted` pending
// inputs follow the window: 0 where it has moved on already.
template <typename X, typename S>
class Inputs {
 public:
  Inputs(const ConvVerifyParams& p, int64_t b, int64_t slot, int64_t begin, int64_t accepted)
      : p_(p), b_(b), prefix_(p.has_prefix ? p.prefix.nodes : 0), begin_(begin), accepted_(accepted) {
    window_ = static_cast<const S*>(p.state.data) + slot * p.state.slot_stride + begin;
  }

  // rows [W] of new node n, oldest first.
  void find(int64_t n, InputRow* rows) const {
    int64_t id = prefix_ + n;
    int64_t j = std::min<int64_t>(p_.W, kMaxConvWidth) - 1;
    for (; j >= 0 && id >= 0; --j) {
      rows[j] = {id < prefix_ ? raw(p_.prefix, id) : raw(p_.x, id - prefix_), false};
      id = parent(id);
    }
    // Past a root: the newest window row is the youngest input that is left.
    for (int64_t row = p_.W - 2 + accepted_; j >= 0; --j, --row) {
      if (row < p_.W - 1) {
        rows[j] = {window_ + row * p_.C, true};
      } else {
        rows[j] = {raw(p_.pending, path_node(p_.pending_path, b_, row - (p_.W - 1))), false};
      }
    }
  }

 private:
  const X* raw(const ConvInputView& in, int64_t n) const {
    return static_cast<const X*>(in.x) + b_ * in.stride_b + n * in.stride_n + begin_;
  }

  int64_t parent(int64_t id) const {
    if (id < prefix_) return p_.prefix_parents != nullptr ? p_.prefix_parents[b_ * prefix_ + id] : id - 1;
    return p_.parents != nullptr ? p_.parents[b_ * p_.N + id - prefix_] : id - 1;
  }

  const ConvVerifyParams& p_;
  int64_t b_, prefix_, begin_, accepted_;
  const S* window_;
};

template <typename X, typename S, bool kWhole>
Vec load_input(const InputRow& row, int64_t c, int64_t count) {
  const int64_t lanes = kWhole ? Vec::kWidth : count;
  if (!std::is_same_v<X, S> && row.in_window) return load_some(static_cast<const S*>(row.data) + c, lanes);
  return load_some(static_cast<const X*>(row.data) + c, lanes);
}

// One vector of channels of one node; `count` lanes of it where kWhole is false.
template <typename X, typename S, int kW, bool kSilu, bool kWhole>
void run_vector(const Taps& taps, const InputRow* rows, int64_t W, int64_t c, int64_t count, X* y) {
  Vec sum = Vec::load(taps.bias + c);
  const int64_t width = kW > 0 ? kW : W;
  for (int64_t j = 0; j < width; ++j) {
    sum = fma(Vec::load(taps.weight[j] + c), load_input<X, S, kWhole>(rows[j], c, count), sum);
  }
  if (kSilu) sum = silu(sum);
  store_some(y + c, sum, kWhole ? Vec::kWidth : count);
}

template <typename X, typename S, int kW, bool kSilu>
void run_tile(const ConvVerifyParams& p, const Inputs<X, S>& inputs, int64_t length, int64_t begin,
              int64_t count, X* y, int64_t stride) {
  Taps taps;
  taps.fill<kW>(p, begin, count);
  const int64_t whole = count / Vec::kWidth * Vec::kWidth;
  for (int64_t n = 0; n < length; ++n, y += stride) {
    InputRow rows[kMaxConvWidth];
    inputs.find(n, rows);
    for (int64_t c = 0; c < whole; c += Vec::kWidth) {
      run_vector<X, S, kW, kSilu, true>(taps, rows, p.W, c, Vec::kWidth, y);
    }
    if (whole < count) run_vector<X, S, kW, kSilu, false>(taps, rows, p.W, whole, count - whole, y);
  }
}

}  // namespace conv

// y [length, count] with a free row stride <- channels [begin, begin + count) of the new nodes of row b.
template <typename X, typename S>
inline void convolve(const ConvVerifyParams& p, int64_t b, int64_t slot, int64_t accepted, int64_t length,
                     int64_t begin, int64_t count, X* y, int64_t stride) {
  const auto run = [&](auto tile) {
    for (int64_t done = 0; done < count; done += conv::kTile) {
      const conv::Inputs<X, S> inputs(p, b, slot, begin + done, accepted);
      tile(inputs, begin + done, std::min(conv::kTile, count - done), y + done);
    }
  };
  const bool silu = p.activation == Activation::kSilu;
  const auto run_width = [&](auto width) {
    constexpr int kW = decltype(width)::value;
    run([&](const auto& inputs, int64_t from, int64_t n, X* to) {
      silu ? conv::run_tile<X, S, kW, true>(p, inputs, length, from, n, to, stride)
           : conv::run_tile<X, S, kW, false>(p, inputs, length, from, n, to, stride);
    });
  };
  p.W == 4 ? run_width(std::integral_constant<int, 4>()) : run_width(std::integral_constant<int, 0>());
}

}  // namespace specdec::cpu::SPECDEC_ISA
