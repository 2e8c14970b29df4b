// conv_verify: a short causal convolution over a chain or a tree. A node reads its own raw input and those of
// its W-1 nearest ancestors, continued into the prefix and then into the committed window.
//
//   y = act(bias + sum_j weight[j] x_j), oldest input first, fused multiply-adds in float32
//
// One path for every shape: a number depends on its W inputs alone, so a stream gives the same bits however
// it is split into calls.
#include <type_traits>

#include "conv_window.h"
#include "parallel.h"
#include "rows.h"
#include "simd_math.h"
#include "specdec/sequences.h"

namespace specdec::cpu::SPECDEC_ISA {

namespace {

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

// The inputs of the nodes of row b, at channel `begin`. Ids run over the prefix first.
template <typename X, typename S>
class Inputs {
 public:
  Inputs(const ConvVerifyParams& p, int64_t b, int64_t slot, int64_t begin)
      : p_(p), b_(b), prefix_(p.has_prefix ? p.prefix.nodes : 0), begin_(begin) {
    window_ = static_cast<const S*>(p.state.data) + slot * p.state.slot_stride + begin;
  }

  // rows [W] of new node n, oldest first.
  void find(int64_t n, InputRow* rows) const {
    int64_t id = prefix_ + n;
    int64_t j = std::min<int64_t>(p_.W, kMaxConvWidth) - 1;
    for (; j >= 0 && id >= 0; --j) {
      rows[j] = {raw(id), false};
      id = parent(id);
    }
    // Past a root: the newest window row is the youngest input that is left.
    for (int64_t row = p_.W - 2; j >= 0; --j, --row) rows[j] = {window_ + row * p_.C, true};
  }

 private:
  const X* raw(int64_t id) const {
    const ConvInputView& in = id < prefix_ ? p_.prefix : p_.x;
    const int64_t n = id < prefix_ ? id : id - prefix_;
    return static_cast<const X*>(in.x) + b_ * in.stride_b + n * in.stride_n + begin_;
  }

  int64_t parent(int64_t id) const {
    if (id < prefix_) return p_.prefix_parents != nullptr ? p_.prefix_parents[b_ * prefix_ + id] : id - 1;
    return p_.parents != nullptr ? p_.parents[b_ * p_.N + id - prefix_] : id - 1;
  }

  const ConvVerifyParams& p_;
  int64_t b_, prefix_, begin_;
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
void run_tile(const ConvVerifyParams& p, int64_t b, int64_t slot, int64_t length, int64_t begin,
              int64_t count) {
  Taps taps;
  taps.fill<kW>(p, begin, count);
  const Inputs<X, S> inputs(p, b, slot, begin);
  const int64_t whole = count / Vec::kWidth * Vec::kWidth;
  for (int64_t n = 0; n < length; ++n) {
    InputRow rows[kMaxConvWidth];
    inputs.find(n, rows);
    X* y = static_cast<X*>(p.y) + (b * p.N + n) * p.C + begin;
    for (int64_t c = 0; c < whole; c += Vec::kWidth) {
      run_vector<X, S, kW, kSilu, true>(taps, rows, p.W, c, Vec::kWidth, y);
    }
    if (whole < count) run_vector<X, S, kW, kSilu, false>(taps, rows, p.W, whole, count - whole, y);
  }
}

template <typename X, typename S>
void run_tile(const ConvVerifyParams& p, int64_t b, int64_t slot, int64_t length, int64_t begin,
              int64_t count) {
  const bool silu = p.activation == Activation::kSilu;
  if (p.W == 4) {
    silu ? run_tile<X, S, 4, true>(p, b, slot, length, begin, count)
         : run_tile<X, S, 4, false>(p, b, slot, length, begin, count);
  } else {
    silu ? run_tile<X, S, 0, true>(p, b, slot, length, begin, count)
         : run_tile<X, S, 0, false>(p, b, slot, length, begin, count);
  }
}

template <typename X, typename S>
Status run(const ConvVerifyParams& p) {
  if (p.has_pending && p.W > 1) {
    parallel_for(p.B, p.B * p.W * p.C, [&](int64_t b) {
      if (slot_of(p.slots, b) < 0) return;
      S* window = static_cast<S*>(p.state.data) + slot_of(p.slots, b) * p.state.slot_stride;
      advance_window<X, S>(window, p.pending, p.pending_path, b, p.C, p.W);
    });
  }
  const int64_t tiles = (p.C + kTile - 1) / kTile;
  parallel_for(p.B * tiles, p.B * p.N * p.C * p.W, [&](int64_t item) {
    const int64_t b = item / tiles;
    const int64_t begin = item % tiles * kTile;
    const int64_t count = std::min(kTile, p.C - begin);
    const int64_t slot = slot_of(p.slots, b);
    const int64_t length = slot < 0 ? 0 : valid_length(p.lengths, b, p.N);
    if (length > 0) run_tile<X, S>(p, b, slot, length, begin, count);
    for (int64_t n = length; n < p.N; ++n) {
      std::memset(static_cast<X*>(p.y) + (b * p.N + n) * p.C + begin, 0, count * sizeof(X));
    }
  });
  return Status::kOk;
}

}  // namespace

Status conv_verify(const ConvVerifyParams& p) {
  if (p.W < 1 || p.W > kMaxConvWidth) return Status::kUnsupported;
  if (p.has_pending && (p.has_prefix || p.pending.dtype != p.x.dtype)) return Status::kInvalidArgument;
  if (p.has_prefix && p.prefix.dtype != p.x.dtype) return Status::kInvalidArgument;
  return visit_dtype(p.x.dtype, [&](auto x_tag) {
    using X = decltype(x_tag);
    if (p.state.dtype == DType::kFloat32) return run<X, float>(p);
    if (p.state.dtype == p.x.dtype) return run<X, X>(p);
    return Status::kUnsupported;
  });
}

}  // namespace specdec::cpu::SPECDEC_ISA
