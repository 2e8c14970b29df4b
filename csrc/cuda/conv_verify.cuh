// conv_verify: a short causal convolution over a chain or a tree. A node reads its own raw input and those of
// its W-1 nearest ancestors, continued into the prefix and then into the committed window.
//
//   y = act(bias + sum_j weight[j] x_j), oldest input first, fused multiply-adds in float32
//
// A block owns a tile of channels of some sequences. It brings their inputs and windows into shared memory,
// each once, whatever the tree; there every warp walks from its nodes to their ancestors. A lane owns 4 bytes
// of a row of inputs, so its weights stay in registers over nodes. A pending round moves the window on the
// way: the block is the only one that reads or writes these channels of it. A long chain is cut into chunks,
// of which the first alone reaches back into the window.
//
// One order of operations for every shape and instance: a number depends on its W inputs alone.
#pragma once

#include "conv_window.cuh"

namespace specdec::cuda {

constexpr int kMaxConvTreeNodes =
    512;  // nodes of a tree, prefix included: they are in shared memory together

template <typename Traits>
struct ConvVerify {
  using Params = ConvVerifyParams;
  using X = typename Traits::X;
  using S = typename Traits::S;
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocks = Traits::kWidth > 0 ? 6 : 4;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kLane = 4 / static_cast<int>(sizeof(X));  // channels of a lane
  static constexpr int kTile = 32 * kLane;                       // channels of a block
  static constexpr int kChunk = 128;  // nodes of a chain in a block, at least W - 1
  static constexpr int kTaps = Traits::kWidth > 0 ? Traits::kWidth : kMaxConvWidth;
  static constexpr bool kStagedTaps = Traits::kVector && Traits::kWidth == 4;
  // What runs at once on 132 multiprocessors. From there on a block takes more sequences: weights are read
  // less, and no second wave of blocks runs half empty.
  static constexpr int kBlocksWanted = 132 * kMinBlocks;
  static constexpr int kMostSequences = 16;

  // How the work is cut; the same on both sides of the launch.
  struct Plan {
    int width;
    bool tree;
    int prefix;     // prefix nodes
    int tiles;      // of channels
    int chunks;     // of nodes
    int sequences;  // of a block
    int rows;       // staged at a time, at most
    int parents;    // kept in shared memory

    SPECDEC_HOST_DEVICE explicit Plan(const Params& p) {
      width = Traits::kWidth > 0 ? Traits::kWidth : static_cast<int>(p.W);
      prefix = p.has_prefix ? static_cast<int>(p.prefix.nodes) : 0;
      tree = p.parents != nullptr || (prefix > 0 && p.prefix_parents != nullptr);
      tiles = static_cast<int>((p.C + kTile - 1) / kTile);
      chunks = tree ? 1 : static_cast<int>((p.N + kChunk - 1) / kChunk);
      // A row without nodes still settles what is pending.
      if (chunks == 0) chunks = p.has_pending ? 1 : 0;
      const int64_t waves = (p.B * tiles * chunks + kBlocksWanted - 1) / kBlocksWanted;
      sequences = waves < 1 ? 1 : waves > kMostSequences ? kMostSequences : static_cast<int>(waves);
      const int nodes = static_cast<int>(p.N < kChunk || tree ? p.N : kChunk);
      rows = tree ? prefix + nodes : nodes + width - 1;
      parents = tree ? prefix + nodes : 0;
    }
  };

  static Launch shape(const Params& p) {
    const Plan plan(p);
    const int64_t blocks = (p.B + plan.sequences - 1) / plan.sequences * plan.tiles;
    // take() aligns each array to 16 bytes.
    const int64_t bytes = int64_t{plan.rows} * kTile * sizeof(X) +
                          int64_t{plan.width - 1} * kTile * sizeof(S) +
                          (int64_t{plan.parents} + 3) / 4 * 4 * sizeof(int32_t) +
                          (kStagedTaps ? int64_t{kTile} * 5 * sizeof(float) : 0);
    return {{blocks <= INT32_MAX ? static_cast<int32_t>(blocks) : -1, plan.chunks, 1}, bytes};
  }

  SPECDEC_DEVICE static void run(const Params& p, SharedArena shared) {
    const Plan plan(p);
    const Block self(p, plan, shared);
    const int64_t first = static_cast<int64_t>(block().x / plan.tiles) * plan.sequences;
    for (int64_t b = first; b < first + plan.sequences && b < p.B; ++b) {
      if (b > first) barrier();  // all have read the last sequence's rows
      self.sequence(b);
    }
    copy_async_wait<0>();  // no sequence had nodes: the weights are still on their way
  }

 private:
  struct Taps {
    float weight[kTaps][kLane];  // [0]: of the newest input
    float bias[kLane];
  };

  struct Block {
    const Params& p;
    const Plan& plan;
    int64_t channel;          // the tile's first
    int begin, end;           // nodes of the chunk
    Shared<X> staged;         // [rows, kTile]
    Shared<S> window;         // [W-1, kTile], after what is pending
    Shared<int32_t> parents;  // of a tree, by id
    Shared<float> taps;       // [kTile, 4] and biases [kTile], where kStagedTaps

    SPECDEC_DEVICE Block(const Params& params, const Plan& how, SharedArena& shared) : p(params), plan(how) {
      channel = static_cast<int64_t>(block().x % plan.tiles) * kTile;
      begin = block().y * kChunk;
      const int64_t rest = p.N - begin;
      end = begin + static_cast<int>(plan.tree || rest < kChunk ? rest : kChunk);
      staged = shared.take<X>(plan.rows * kTile);
      window = shared.take<S>((plan.width - 1) * kTile);
      parents = shared.take<int32_t>(plan.parents);
      if constexpr (kStagedTaps) {
        taps = shared.take<float>(kTile * 5);
        stage_taps();
      }
    }

    SPECDEC_DEVICE int64_t own_channel(int i = 0) const { return channel + lane() * kLane + i; }

    // Weights and biases of the tile, once a block. The wait is the first sequence's.
    SPECDEC_DEVICE void stage_taps() const {
      const Global<const float> w(p.weight), given_bias(p.bias);
      for (int c = thread(); c < kTile; c += kThreads) {
        if (channel + c < p.C) copy_async<4>(taps, c * 4, w, (channel + c) * 4);
      }
      for (int c = thread() * 4; c < kTile; c += kThreads * 4) {
        if (channel + c < p.C)
          copy_async<4>(taps + kTile * 4, c, given_bias, p.bias ? channel + c : 0, bool(given_bias));
      }
      copy_async_commit();
    }

    // This lane's, from shared memory or from the pool's rows.
    SPECDEC_DEVICE Taps load_taps() const {
      Taps own;
      const Global<const float> w(p.weight), given_bias(p.bias);
#pragma unroll
      for (int i = 0; i < kLane; ++i) {
        const int64_t c = own_channel(i);
        const bool valid = c < p.C;
        if constexpr (kStagedTaps) {
          const int at = lane() * kLane + i;
          const Pack<float, 4> taps_of_c = valid ? taps.template load_vec<4>(at * 4) : Pack<float, 4>{};
#pragma unroll
          for (int t = 0; t < 4; ++t) own.weight[t][i] = taps_of_c[3 - t];
          own.bias[i] = valid ? taps.load(kTile * 4 + at) : 0.0f;
        } else {
#pragma unroll
          for (int t = 0; t < kTaps; ++t) {
            own.weight[t][i] = valid && t < plan.width ? w.load(c * plan.width + plan.width - 1 - t) : 0.0f;
          }
          own.bias[i] = valid && given_bias ? given_bias.load(c) : 0.0f;
        }
      }
      return own;
    }

    SPECDEC_DEVICE void sequence(int64_t b) const {
      const int64_t slot = slot_of(p.slots, b, p.state.slots);
      const int length = slot < 0 ? 0 : length_of(p.lengths, b, p.N);
      const int last = length < end ? length : end;
      const Global<X> y = Global<X>(static_cast<X*>(p.y)) + b * p.N * p.C;
      const bool has_nodes = last > begin;
      const int reach = plan.prefix + begin - (plan.width - 1);
      const int first_id = plan.tree || reach < 0 ? 0 : reach;  // the oldest node that the chunk reads
      if (has_nodes) {
        stage_rows(b, first_id, plan.prefix + last);
        if (plan.tree) stage_parents(b, last);
      }
      if (slot >= 0 && begin == 0) move_window(b, slot, has_nodes);
      if (has_nodes) {
        copy_async_wait<0>();
        barrier();
        const Taps own = load_taps();
        for (int n = begin + warp(); n < last; n += kWarps) store(y, n, node(own, plan.prefix + n, first_id));
      }
      for (int n = (has_nodes ? last : begin) + warp(); n < end; n += kWarps) store(y, n, Pack<X, kLane>{});
    }

    // Raw inputs of the ids [from, to), this tile's channels.
    SPECDEC_DEVICE void stage_rows(int64_t b, int from, int to) const {
      const Global<const X> x = Global<const X>(static_cast<const X*>(p.x.x)) + b * p.x.stride_b + channel;
      const Global<const X> before =
          offset(static_cast<const X*>(p.has_prefix ? p.prefix.x : nullptr), b * p.prefix.stride_b + channel);
      constexpr int kVec = Traits::kVector ? 16 / static_cast<int>(sizeof(X)) : 1;
      constexpr int kVectors = kTile / kVec;  // of a row
      for (int i = thread(); i < (to - from) * kVectors; i += kThreads) {
        const int row = i / kVectors, c = i % kVectors * kVec;
        const int id = from + row;
        const bool old = id < plan.prefix;
        const Global<const X> source = old ? before : x;
        const int64_t at = old ? id * p.prefix.stride_n : (id - plan.prefix) * p.x.stride_n;
        if constexpr (Traits::kVector) {
          if (channel + c < p.C) copy_async<kVec>(staged, row * kTile + c, source, at + c);
        } else {
          staged.store(row * kTile + c, channel + c < p.C ? source.load(at + c) : X{});
        }
      }
      copy_async_commit();
    }

    SPECDEC_DEVICE void stage_parents(int64_t b, int last) const {
      const Global<const int32_t> own = offset(p.parents, b * p.N);
      const Global<const int32_t> before = offset(p.has_prefix ? p.prefix_parents : nullptr, b * plan.prefix);
      for (int id = thread(); id < plan.prefix + last; id += kThreads) {
        const Global<const int32_t> given = id < plan.prefix ? before : own;
        const int64_t at = id < plan.prefix ? id : id - plan.prefix;
        parents.store(id, given ? parent_of(given.load(at), id) : id - 1);
      }
    }

    // The window goes to shared memory and, where something is pending, back to the pool.
    SPECDEC_DEVICE void move_window(int64_t b, int64_t slot, bool needed) const {
      WindowAdvance<X, S> move(p.state, slot);
      if (p.has_pending) move.accept(p.pending, p.pending_path, b);
      if (!needed && move.accepted == 0) return;
      constexpr int kVec = Traits::kVector ? 16 / static_cast<int>(sizeof(S)) : 1;
      const int c = thread() * kVec;
      if (c >= kTile || channel + c >= p.C) return;
      move.template columns<kVec>(channel + c, p.C, plan.width, [&](int row, const Pack<S, kVec>& pack) {
        if constexpr (kVec == 1) {
          window.store(row * kTile + c, pack[0]);
        } else {
          window.template store_vec<kVec>(row * kTile + c, pack);
        }
      });
    }

    // y of one node, this lane's channels.
    SPECDEC_DEVICE Pack<X, kLane> node(const Taps& own, int id, int first_id) const {
      Pack<X, kLane> y{};
      if (own_channel() >= p.C) return y;
      int ids[kTaps];  // newest first; -1: the newest row of the window, -2: the one before
#pragma unroll
      for (int t = 0; t < kTaps; ++t) {
        ids[t] = id;
        if (t + 1 < plan.width) id = plan.tree && id >= 0 ? parents.load(id) : id - 1;
      }
      float sum[kLane];
#pragma unroll
      for (int i = 0; i < kLane; ++i) sum[i] = own.bias[i];
#pragma unroll
      for (int t = kTaps - 1; t >= 0; --t) {
        if (t < plan.width) add(ids[t], first_id, own.weight[t], sum);
      }
#pragma unroll
      for (int i = 0; i < kLane; ++i) {
        if (p.activation == Activation::kSilu) sum[i] = sum[i] / (1.0f + exp(-sum[i]));
        y[i] = round_to<X>(sum[i]);
      }
      return y;
    }

    SPECDEC_DEVICE void add(int id, int first_id, const float (&w)[kLane], float (&sum)[kLane]) const {
      if (id >= 0) {
        const Pack<X, kLane> x = staged.template load_vec<kLane>((id - first_id) * kTile + lane() * kLane);
#pragma unroll
        for (int i = 0; i < kLane; ++i) sum[i] = fma(w[i], float_of(x[i]), sum[i]);
        return;
      }
      const int at = (plan.width - 1 + id) * kTile + lane() * kLane;
      if constexpr (Traits::kVector) {
        const Pack<S, kLane> x = window.template load_vec<kLane>(at);
#pragma unroll
        for (int i = 0; i < kLane; ++i) sum[i] = fma(w[i], float_of(x[i]), sum[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kLane; ++i) {
          // A row that ends inside this lane's channels leaves the rest of the window unwritten.
          if (own_channel(i) < p.C) sum[i] = fma(w[i], float_of(window.load(at + i)), sum[i]);
        }
      }
    }

    SPECDEC_DEVICE void store(const Global<X>& y, int n, const Pack<X, kLane>& pack) const {
      const int64_t at = n * p.C + own_channel();
      if constexpr (Traits::kVector) {
        if (own_channel() < p.C) y.template store_vec<kLane>(at, pack);
      } else {
#pragma unroll
        for (int i = 0; i < kLane; ++i) {
          if (own_channel(i) < p.C) y.store(at + i, pack[i]);
        }
      }
    }
  };
};

}  // namespace specdec::cuda
