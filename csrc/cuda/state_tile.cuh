// A tile of the state in registers: some value rows of one head, each with its full key dimension, and the
// step of the recurrence on it ("The step, to the bit" of docs/architecture.md).
//
// Eight lanes hold a row and a thread holds kR rows. Lane l has the columns of the 16-byte words l, l + 8,
// ... of a row, so that eight lanes load 128 contiguous bytes. A dot is summed by each lane over its columns
// in ascending order, then over lanes 4, 2 and 1 apart: its bits depend on DK and the state's type alone, not
// on the tile, the batch or the tree.
#pragma once

#include "primitives.cuh"
#include "specdec/params.h"

namespace specdec::cuda {

// kChannelGate: one decay a key channel; otherwise one a head, which is 1 without gate.
template <bool kChannelGate_, typename State_, int kDK_, int kThreads_, int kR_>
struct TileTraits {
  using State = State_;
  static constexpr bool kChannelGate = kChannelGate_;
  static constexpr int kDK = kDK_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kR = kR_;  // rows of a thread

  static constexpr int kLanes = 8;  // of a row
  static constexpr int kRows = kThreads / kLanes * kR;
  static constexpr int kColumns = kDK / kLanes;  // of a thread
  static constexpr int kQuads = kColumns / 4;
  // Elements of one access: 16 bytes, or 8 where a bfloat16 row has an odd number of 64-byte halves.
  static constexpr int kWord = 16 / static_cast<int>(sizeof(State));
  static constexpr int kVec = kDK % (kLanes * kWord) == 0 ? kWord : kWord / 2;
  static_assert(kDK % 32 == 0 && (kR == 1 || kR == 2 || kR == 4));
};

// Sums V numbers over 2 * kMask lanes. Every lane is left with one sum: the halves of x part where lanes
// differ in the bit kMask, the quarters in kMask / 2, and so on. The order of a sum does not depend on V.
template <int kMask, int V>
SPECDEC_DEVICE float scatter_sum(const float (&x)[V]) {
  if constexpr (kMask == 0) {
    static_assert(V == 1);
    return x[0];
  } else if constexpr (V == 1) {
    const float y[1] = {x[0] + shuffle_xor(x[0], kMask)};
    return scatter_sum<kMask / 2>(y);
  } else {
    const bool upper = (lane() & kMask) != 0;
    float y[V / 2];
    SPECDEC_UNROLL
    for (int i = 0; i < V / 2; ++i) {
      const float given = upper ? x[i] : x[i + V / 2];
      y[i] = (upper ? x[i + V / 2] : x[i]) + shuffle_xor(given, kMask);
    }
    return scatter_sum<kMask / 2>(y);
  }
}

template <typename Traits>
class StateTile {
  static constexpr int kR = Traits::kR, kLanes = Traits::kLanes, kQuads = Traits::kQuads, kVec = Traits::kVec;
  // Keys that a thread keeps between the dots and the update of a token, where registers allow it.
  static constexpr bool kKeepKeys = Traits::kDK <= 128;

 public:
  using State = typename Traits::State;

  // --- where things are ---

  SPECDEC_DEVICE static int row() { return thread() / kLanes * kR; }  // the thread's first row of the tile
  SPECDEC_DEVICE static int part() { return thread() % kLanes; }
  // The row, 0 to kR - 1, whose sums this lane is left with by `ask`, and a lane that has those of row r.
  SPECDEC_DEVICE static int own_row() { return part() % 4 / (4 / kR); }
  SPECDEC_DEVICE static int lane_of(int r) { return lane() / kLanes * kLanes + r * (4 / kR); }
  // One lane of a row writes its answers: the first for the sums of keys, the second for those of queries.
  SPECDEC_DEVICE static bool speaks() { return part() % (4 / kR) == 0; }
  SPECDEC_DEVICE static bool speaks_for_keys() { return part() < 4; }
  // Where column c of a key lies in shared memory: the four columns of quad i of all lanes are neighbours.
  SPECDEC_DEVICE static int place(int c) {
    const int word = c / kVec, quad = word / kLanes * (kVec / 4) + c % kVec / 4;
    return 4 * (quad * kLanes + word % kLanes) + c % 4;
  }

  // --- global memory: `state` is the first row of the tile ---

  SPECDEC_DEVICE void load(const Global<const State>& state) {
    SPECDEC_UNROLL
    for (int r = 0; r < kR; ++r) {
      SPECDEC_UNROLL
      for (int w = 0; w < Traits::kColumns / kVec; ++w) {
        const Pack<State, kVec> pack = state.template load_vec<kVec>(offset(r, w));
        SPECDEC_UNROLL
        for (int e = 0; e < kVec; ++e) s_[r][w * kVec + e] = float_of(pack[e]);
      }
    }
  }

  // A bfloat16 state is rounded where it is written; the token after continues from what was written.
  SPECDEC_DEVICE void store(const Global<State>& state) {
    SPECDEC_UNROLL
    for (int r = 0; r < kR; ++r) {
      SPECDEC_UNROLL
      for (int w = 0; w < Traits::kColumns / kVec; ++w) {
        Pack<State, kVec> pack;
        SPECDEC_UNROLL
        for (int e = 0; e < kVec; ++e) {
          pack[e] = round_to<State>(s_[r][w * kVec + e]);
          s_[r][w * kVec + e] = float_of(pack[e]);
        }
        state.template store_vec<kVec>(offset(r, w), pack);
      }
    }
  }

  // --- memory of the threads themselves: float32, each thread reads what it wrote ---

  static constexpr int kSavedFloats = Traits::kRows * Traits::kDK;

  template <typename Memory>
  SPECDEC_DEVICE void save(const Memory& to) const {
    SPECDEC_UNROLL
    for (int r = 0; r < kR; ++r) {
      SPECDEC_UNROLL
      for (int i = 0; i < kQuads; ++i) {
        to.template store_vec<4>(saved(r, i), Pack<float, 4>{{s_[r][4 * i], s_[r][4 * i + 1],
                                                              s_[r][4 * i + 2], s_[r][4 * i + 3]}});
      }
    }
  }
  template <typename Memory>
  SPECDEC_DEVICE void restore(const Memory& from) {
    SPECDEC_UNROLL
    for (int r = 0; r < kR; ++r) {
      SPECDEC_UNROLL
      for (int i = 0; i < kQuads; ++i) {
        const Pack<float, 4> pack = from.template load_vec<4>(saved(r, i));
        SPECDEC_UNROLL
        for (int e = 0; e < 4; ++e) s_[r][4 * i + e] = pack[e];
      }
    }
  }

  // --- the step: k, q and decay [DK] placed in shared memory, a the decay of a head ---

  // S <- a o S with a gate per channel; sums of S k and S q of this lane's row.
  SPECDEC_DEVICE void ask(const Shared<float>& k, const Shared<float>& q, const Shared<float>& decay,
                          float* sk, float* sq) {
    float sums[2 * kR];
    SPECDEC_UNROLL
    for (int r = 0; r < 2 * kR; ++r) sums[r] = 0.0f;
    SPECDEC_UNROLL
    for (int i = 0; i < kQuads; ++i) {
      const int at = quad(i);
      const Pack<float, 4> kk = k.template load_vec<4>(at), qq = q.template load_vec<4>(at);
      if constexpr (Traits::kChannelGate) scale(i, decay.template load_vec<4>(at));
      if constexpr (kKeepKeys) keys_[i] = kk;
      SPECDEC_UNROLL
      for (int r = 0; r < kR; ++r) {
        SPECDEC_UNROLL
        for (int e = 0; e < 4; ++e) {
          sums[r] = fma(s_[r][4 * i + e], kk[e], sums[r]);
          sums[kR + r] = fma(s_[r][4 * i + e], qq[e], sums[kR + r]);
        }
      }
    }
    const float sum = scatter_sum<kLanes / 2>(sums);
    const float other = shuffle_xor(sum, kLanes / 2);
    *sk = speaks_for_keys() ? sum : other;
    *sq = speaks_for_keys() ? other : sum;
  }

  // The rest of the step after `ask` of the same token: S <- fma(u, k, a S), u of this lane's row.
  SPECDEC_DEVICE void advance(const Shared<float>& k, float a, float u) {
    float writes[kR];
    SPECDEC_UNROLL
    for (int r = 0; r < kR; ++r) writes[r] = shuffle(u, lane_of(r));
    SPECDEC_UNROLL
    for (int i = 0; i < kQuads; ++i) {
      if constexpr (kKeepKeys) {
        write(i, keys_[i], Traits::kChannelGate ? 1.0f : a, writes);
      } else {
        write(i, k.template load_vec<4>(quad(i)), Traits::kChannelGate ? 1.0f : a, writes);
      }
    }
  }

  // The step of a token that was asked before: u [kRows] in shared memory.
  SPECDEC_DEVICE void replay(const Shared<float>& k, const Shared<float>& decay, float a,
                             const Shared<float>& u) {
    float writes[kR];
    SPECDEC_UNROLL
    for (int r = 0; r < kR; ++r) writes[r] = u.load(row() + r);
    SPECDEC_UNROLL
    for (int i = 0; i < kQuads; ++i) {
      if constexpr (Traits::kChannelGate) scale(i, decay.template load_vec<4>(quad(i)));
      write(i, k.template load_vec<4>(quad(i)), Traits::kChannelGate ? 1.0f : a, writes);
    }
  }

  // --- closed form ---

  SPECDEC_DEVICE void clear() {
    SPECDEC_UNROLL
    for (int r = 0; r < kR; ++r) {
      SPECDEC_UNROLL
      for (int c = 0; c < Traits::kColumns; ++c) s_[r][c] = 0.0f;
    }
  }

  // S <- S + u k^T.
  SPECDEC_DEVICE void add(const Shared<float>& k, const Shared<float>& u) {
    float writes[kR];
    SPECDEC_UNROLL
    for (int r = 0; r < kR; ++r) writes[r] = u.load(row() + r);
    SPECDEC_UNROLL
    for (int i = 0; i < kQuads; ++i) {
      const Pack<float, 4> kk = k.template load_vec<4>(quad(i));
      SPECDEC_UNROLL
      for (int r = 0; r < kR; ++r) {
        SPECDEC_UNROLL
        for (int e = 0; e < 4; ++e) s_[r][4 * i + e] = fma(writes[r], kk[e], s_[r][4 * i + e]);
      }
    }
  }

  // state <- exp(log_decay) o state + S; log_decay is one number, or [DK] placed with a gate per channel.
  SPECDEC_DEVICE void add_to(const Global<State>& state, const Shared<float>& log_decay, bool gated) {
    const float one = Traits::kChannelGate || !gated ? 1.0f : exp(log_decay.load(0));
    SPECDEC_UNROLL
    for (int w = 0; w < Traits::kColumns / kVec; ++w) {
      float a[kVec];
      SPECDEC_UNROLL
      for (int e = 0; e < kVec; ++e) {
        a[e] = Traits::kChannelGate ? exp(log_decay.load(quad(w * (kVec / 4) + e / 4) + e % 4)) : one;
      }
      SPECDEC_UNROLL
      for (int r = 0; r < kR; ++r) {
        Pack<State, kVec> pack = state.template load_vec<kVec>(offset(r, w));
        SPECDEC_UNROLL
        for (int e = 0; e < kVec; ++e) {
          pack[e] = round_to<State>(fma(a[e], float_of(pack[e]), s_[r][w * kVec + e]));
        }
        state.template store_vec<kVec>(offset(r, w), pack);
      }
    }
  }

 private:
  SPECDEC_DEVICE static int64_t offset(int r, int w) {
    return (row() + r) * Traits::kDK + (w * kLanes + part()) * kVec;
  }
  SPECDEC_DEVICE static int saved(int r, int i) {
    return ((r * kQuads + i) * Traits::kThreads + thread()) * 4;
  }
  SPECDEC_DEVICE static int quad(int i) { return 4 * (i * kLanes + part()); }

  SPECDEC_DEVICE void scale(int i, const Pack<float, 4>& a) {
    SPECDEC_UNROLL
    for (int r = 0; r < kR; ++r) {
      SPECDEC_UNROLL
      for (int e = 0; e < 4; ++e) s_[r][4 * i + e] = a[e] * s_[r][4 * i + e];
    }
  }
  SPECDEC_DEVICE void write(int i, const Pack<float, 4>& k, float a, const float (&u)[kR]) {
    SPECDEC_UNROLL
    for (int r = 0; r < kR; ++r) {
      SPECDEC_UNROLL
      for (int e = 0; e < 4; ++e) {
        float& s = s_[r][4 * i + e];
        s = fma(u[r], k[e], Traits::kChannelGate ? s : a * s);
      }
    }
  }

  float s_[kR][Traits::kColumns];
  Pack<float, 4> keys_[kKeepKeys ? kQuads : 1];
};

}  // namespace specdec::cuda
