// accept_greedy: the argmax of every valid row of logits, then the walk over the candidates. Two launches:
// rows are long and few, so each is cut into parts for a block apiece, and the walk joins them.
#pragma once

#include "accept_walk.cuh"
#include "specdec/sampling_math.h"

namespace specdec::cuda {

constexpr int kGreedyPart = 8192;  // logits of a block

struct AcceptGreedyWork {
  AcceptGreedyParams op;
  uint64_t* best = nullptr;  // [B, N, parts]

  SPECDEC_HOST_DEVICE int parts() const { return static_cast<int>((op.V + kGreedyPart - 1) / kGreedyPart); }
};

// A logit and its token as one number: of two the larger is the larger logit, at equal logits the smaller
// token. NaN is larger than all numbers.
SPECDEC_DEVICE uint64_t greedy_key(float x, int64_t token) {
  return static_cast<uint64_t>(rank_or_nan(x)) << 32 | (0xffffffffu - static_cast<uint32_t>(token));
}

// -1 where the row has no finite maximum or a NaN.
SPECDEC_DEVICE int32_t greedy_token(uint64_t key) {
  return is_finite_rank(static_cast<uint32_t>(key >> 32))
             ? static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(key))
             : -1;
}

// The best key of each part of each row.
template <typename T, bool kVector>
struct GreedyParts {
  using Params = AcceptGreedyWork;
  static constexpr int kThreads = 256;
  static constexpr int kVec = kVector ? 16 / static_cast<int>(sizeof(T)) : 1;

  static Launch shape(const Params& p) {
    const int64_t blocks = p.op.B * p.op.N * p.parts();
    return {{blocks <= INT32_MAX ? static_cast<int32_t>(blocks) : -1, 1, 1},
            kThreads / 32 * sizeof(uint64_t)};
  }

  SPECDEC_DEVICE static void run(const Params& p, SharedArena shared) {
    const int parts = p.parts();
    const int part = block().x % parts;
    const int64_t row = block().x / parts, b = row / p.op.N;
    const int n = static_cast<int>(row % p.op.N);
    if (n >= draft_length(p.op.draft, b, p.op.N)) return;
    const int64_t first = int64_t{part} * kGreedyPart;
    const int64_t end = first + kGreedyPart < p.op.V ? first + kGreedyPart : p.op.V;
    const Global<const T> logits =
        Global<const T>(static_cast<const T*>(p.op.logits)) + b * p.op.stride_b + n * p.op.stride_n;
    uint64_t best = 0;
    SPECDEC_UNROLL_BY(4)
    for (int64_t i = first + thread() * kVec; i < end; i += kThreads * kVec) {
      if constexpr (kVector) {
        const Pack<T, kVec> pack = logits.template load_vec<kVec>(i);
        SPECDEC_UNROLL
        for (int j = 0; j < kVec; ++j) best = larger(best, greedy_key(float_of(pack[j]), i + j));
      } else {
        best = larger(best, greedy_key(float_of(logits.load(i)), i));
      }
    }
    for (int mask = 16; mask > 0; mask /= 2) {
      const uint32_t high = shuffle_xor(static_cast<uint32_t>(best >> 32), mask);
      const uint32_t low = shuffle_xor(static_cast<uint32_t>(best), mask);
      best = larger(best, static_cast<uint64_t>(high) << 32 | low);
    }
    const Shared<uint64_t> of_warps = shared.take<uint64_t>(kThreads / 32);
    if (lane() == 0) of_warps.store(warp(), best);
    barrier();
    if (thread() != 0) return;
    for (int w = 1; w < kThreads / 32; ++w) best = larger(best, of_warps.load(w));
    Global<uint64_t>(p.best).store(block().x, best);
  }

 private:
  SPECDEC_DEVICE static uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }
};

struct GreedyWalk {
  using Params = AcceptGreedyWork;
  static constexpr int kThreads = kWalkThreads;

  static Launch shape(const Params& p) {
    return {{static_cast<int32_t>(p.op.B), 1, 1}, walk_shared_bytes(p.op.N)};
  }

  SPECDEC_DEVICE static void run(const Params& p, SharedArena shared) {
    const int64_t b = block().x;
    const int parts = p.parts();
    walk(p.op.draft, p.op.accepted, p.op.N, b, shared, [&](int n) {
      const Global<const uint64_t> keys = Global<const uint64_t>(p.best) + (b * p.op.N + n) * parts;
      uint64_t best = 0;
      for (int i = 0; i < parts; ++i) {
        const uint64_t key = keys.load(i);
        if (key > best) best = key;
      }
      return greedy_token(best);
    });
  }
};

}  // namespace specdec::cuda
