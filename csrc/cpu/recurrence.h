// The step of the recurrence on a few value rows: "The step, to the bit" of docs/architecture.md.
//
//   advance:  S <- fma(u, k, a S)           the factor of a node
//   dots:     sk += S k;   sq += S q        what the next token asks
//
// step_rows does both in one pass over the rows, four vector operations, one load and one store a chunk: the
// tokens of a chain. fold_rows applies many factors before a chunk is written: commits, pending factors, the
// replay of a prefix. Both advance a chunk by `advanced`, so their bits agree. One accumulator a row and dot,
// chunks in ascending order, lanes in the order of hsum: a sum depends on DK and the vector width alone.
#pragma once

#include <type_traits>

#include "parallel.h"
#include "simd.h"
#include "simd_math.h"
#include "simd_reduce.h"
#include "specdec/params.h"

namespace specdec::cpu::SPECDEC_ISA {

// One factor of a node, in one head.
struct Factor {
  const float* u;      // [DV]
  const float* k;      // [DK]
  const float* decay;  // exp(g): one number, [DK] with a gate per channel, unused without gate
};

// What a token asks of its parent's state.
struct Probe {
  const float* k;      // [DK]
  const float* q;      // [DK], scaled
  const float* decay;  // [DK] with a gate per channel (the dots read the decayed state), else unused
};

// Rows that share the loads of k and q: both dots of all rows fill one hsum_all.
constexpr int kRows = Vec::kWidth / 2;

// DK is a multiple of it: no vector reaches over the end of a row, on any instruction set.
constexpr int64_t kKeyMultiple = 16;

namespace detail {

// The decay of one chunk: `decay` is one number a head, or one a channel.
template <Gate kGate>
SPECDEC_INLINE Vec decay_chunk(const float* decay, int64_t c) {
  if constexpr (kGate == Gate::kHead) return Vec::set(decay[0]);
  if constexpr (kGate == Gate::kChannel) return Vec::load(decay + c);
  return Vec::zero();
}

template <Gate kGate>
SPECDEC_INLINE Vec decayed(Vec s, Vec a) {
  return kGate == Gate::kNone ? s : a * s;
}

template <Gate kGate>
SPECDEC_INLINE Vec advanced(Vec s, Vec a, Vec u, Vec k) {
  return fma(u, k, decayed<kGate>(s, a));
}

// A bfloat16 state is rounded where it is written; the token after reads what was written.
inline Vec written(float* p, Vec s) {
  s.store(p);
  return s;
}
inline Vec written(bf16* p, Vec s) {
  store(p, s);
  return Vec::load(p);
}

}  // namespace detail

// State that a later pass reads, fetched into the second-level cache along the way. Rows are too short for
// the hardware to notice the stream, and a whole block at once would fill the miss buffers: a pass may take a
// share of its rows.
struct Ahead {
  const char* at = nullptr;  // row 0, chunk 0
  int64_t rows = 0;          // of every block of kRows
};

// Inlined by force: GCC takes a function that only prefetches for one without effect and drops its calls.
SPECDEC_INLINE void fetch(const Ahead& ahead, int64_t DK, int64_t c, int64_t element) {
  for (int64_t r = 0; r < ahead.rows; ++r) __builtin_prefetch(ahead.at + (r * DK + c) * element, 0, 2);
}

// Chunks [c, c + kC) of kR rows take `count` factors in token order. A row's chunk is one chain of dependent
// operations, so several chunks are under way at once.
template <Gate kGate, int kR, int kC, int kDK, typename Source, typename Target>
SPECDEC_INLINE void fold_chunks(const Source* source, Target* target, int64_t dk, int64_t c,
                                const Factor* factors, int64_t count, int64_t row) {
  const int64_t DK = kDK > 0 ? kDK : dk;
  constexpr int kW = Vec::kWidth;
  Vec s[kC][kR];
  for (int i = 0; i < kC; ++i) {
    for (int r = 0; r < kR; ++r) s[i][r] = Vec::load(source + r * DK + c + i * kW);
  }
  for (int64_t j = 0; j < count; ++j) {
    const float* u = factors[j].u + row;
    Vec a[kC], k[kC];
    for (int i = 0; i < kC; ++i) {
      a[i] = detail::decay_chunk<kGate>(factors[j].decay, c + i * kW);
      k[i] = Vec::load(factors[j].k + c + i * kW);
    }
    for (int r = 0; r < kR; ++r) {
      const Vec ur = Vec::set(u[r]);
      for (int i = 0; i < kC; ++i) s[i][r] = detail::advanced<kGate>(s[i][r], a[i], ur, k[i]);
    }
  }
  for (int i = 0; i < kC; ++i) {
    for (int r = 0; r < kR; ++r) store(target + r * DK + c + i * kW, s[i][r]);
  }
}

// Few factors wait for memory, not for each other.
constexpr int64_t kManyFactors = 4;

// kR rows of `source` [kR, DK] take `count` factors and go to `target` (may be `source`). `row` is the first
// row's index in the head.
template <Gate kGate, int kR, int kDK, typename Source, typename Target>
inline void fold_rows(const Source* source, Target* target, int64_t DK, const Factor* factors, int64_t count,
                      int64_t row, const Ahead& ahead) {
  constexpr int kW = Vec::kWidth;
  int64_t c = 0;
  if (count >= kManyFactors) {
    for (; c + 2 * kW <= DK; c += 2 * kW) {
      fetch(ahead, DK, c, sizeof(Source));
      fold_chunks<kGate, kR, 2, kDK>(source, target, DK, c, factors, count, row);
      fetch(ahead, DK, c + kW, sizeof(Source));
    }
  }
  for (; c < DK; c += kW) {
    fetch(ahead, DK, c, sizeof(Source));
    fold_chunks<kGate, kR, 1, kDK>(source, target, DK, c, factors, count, row);
  }
}

// The dots of `probe` with kR rows, after the one factor (kFactor) that leads to them; the advanced rows go
// to `target` (kWrite; may be `source`). Row i's dots are lane i of sk and sq. DK is known at compile time
// where kDK > 0.
template <Gate kGate, int kR, int kDK, bool kFactor, bool kWrite, typename Source, typename Target>
SPECDEC_INLINE void step_rows(const Source* source, Target* target, int64_t dk, const Factor& factor,
                              int64_t row, const Probe& probe, Vec& sk, Vec& sq, const Ahead& ahead) {
  const int64_t DK = kDK > 0 ? kDK : dk;
  // Read once: the compiler cannot know that the stores below leave them alone.
  const float *write = factor.k, *decay = factor.decay, *key = probe.k, *query = probe.q;
  const float* probe_decay = probe.decay;
  const Ahead next = ahead;
  Vec sums[2 * kR], u[kR], a = Vec::zero();
  for (int i = 0; i < 2 * kR; ++i) sums[i] = Vec::zero();
  if constexpr (kFactor) {
    for (int r = 0; r < kR; ++r) u[r] = Vec::set(factor.u[row + r]);
    if constexpr (kGate == Gate::kHead) a = detail::decay_chunk<kGate>(decay, 0);
  }
  for (int64_t c = 0; c < DK; c += Vec::kWidth) {
    fetch(next, DK, c, sizeof(Source));
    if constexpr (kFactor && kGate == Gate::kChannel) a = detail::decay_chunk<kGate>(decay, c);
    Vec wk = Vec::zero();
    if constexpr (kFactor) wk = Vec::load(write + c);
    const Vec k = Vec::load(key + c), q = Vec::load(query + c);
    Vec pa = Vec::zero();
    if constexpr (kGate == Gate::kChannel) pa = detail::decay_chunk<kGate>(probe_decay, c);
    for (int r = 0; r < kR; ++r) {
      Vec s = Vec::load(source + r * DK + c);
      if constexpr (kFactor) s = detail::advanced<kGate>(s, a, u[r], wk);
      if constexpr (kWrite) s = detail::written(target + r * DK + c, s);
      if constexpr (kGate == Gate::kChannel) s = detail::decayed<kGate>(s, pa);
      sums[r] = fma(s, k, sums[r]);
      sums[kR + r] = fma(s, q, sums[kR + r]);
    }
  }
  if constexpr (2 * kR == Vec::kWidth) {
    sk = hsum_all(sums);
    sq = swap_halves(sk);
  } else {
    static_assert(kR == 1);
    sk = Vec::set(hsum(sums[0]));
    sq = Vec::set(hsum(sums[1]));
  }
}

// A pass over the rows [row, row + rows) of one head: `count` factors, then the dots of `children` tokens.
struct Pass {
  int64_t DK;
  int64_t rows, row;
  const Factor* factors;
  int64_t count;
  const Probe* probes;
  int64_t children;
  float* block;  // [kRows, DK], read where a state between factors and dots has no target
  Ahead ahead;   // laid out as the source of the pass
};

inline Ahead at_block(const Ahead& ahead, int64_t r, int64_t DK, int64_t element) {
  return {ahead.at + r * DK * element, ahead.rows};
}

// Calls f(rows, r) on blocks of kRows rows, then on single ones; `rows` is a type.
template <typename F>
SPECDEC_INLINE void for_blocks(int64_t rows, F&& f) {
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) f(std::integral_constant<int, kRows>{}, r);
  for (; r < rows; ++r) f(std::integral_constant<int, 1>{}, r);
}

// One factor, one child: a token of a chain.
template <Gate kGate, int kDK, bool kWrite, typename Source, typename Target, typename Answer>
__attribute__((noinline)) void chain_pass(const Source* source, Target* target, const Pass& p,
                                          Answer&& answer) {
  const int64_t DK = kDK > 0 ? kDK : p.DK;
  const Factor factor = p.factors[0];
  const Probe probe = p.probes[0];
  for_blocks(p.rows, [&](auto rows, int64_t r) {
    Vec sk, sq;
    step_rows<kGate, decltype(rows)::value, kDK, true, kWrite>(
        source + r * DK, kWrite ? target + r * DK : nullptr, DK, factor, p.row + r, probe, sk, sq,
        at_block(p.ahead, r, DK, sizeof(Source)));
    answer(0, r, rows, sk, sq);
  });
}

template <Gate kGate, int kDK, int kR, typename Source, typename Answer>
inline void answer_block(const Source* source, const Pass& p, int64_t first, int64_t r, Ahead ahead,
                         Answer&& answer) {
  for (int64_t c = first; c < p.children; ++c) {
    Vec sk, sq;
    step_rows<kGate, kR, kDK, false, false>(source, static_cast<float*>(nullptr), p.DK, Factor{}, 0,
                                            p.probes[c], sk, sq, ahead);
    answer(c, r, kR, sk, sq);
    ahead = Ahead{};
  }
}

// Any number of factors and children. The first child of one factor is answered while its parent's rows are
// in registers, the others from the block just written, which is in the first cache.
template <Gate kGate, int kDK, typename Source, typename Target, typename Answer>
__attribute__((noinline)) void tree_pass(const Source* source, Target* target, const Pass& p,
                                         Answer&& answer) {
  const int64_t DK = kDK > 0 ? kDK : p.DK;
  for_blocks(p.rows, [&](auto rows, int64_t r) {
    constexpr int kR = decltype(rows)::value;
    const Source* from = source + r * DK;
    const Ahead ahead = at_block(p.ahead, r, DK, sizeof(Source));
    if (p.count == 0) {
      answer_block<kGate, kDK, kR>(from, p, 0, r, ahead, answer);
    } else if (p.count == 1 && p.children > 0 && target != nullptr) {
      Vec sk, sq;
      step_rows<kGate, kR, kDK, true, true>(from, target + r * DK, DK, p.factors[0], p.row + r, p.probes[0],
                                            sk, sq, ahead);
      answer(0, r, kR, sk, sq);
      answer_block<kGate, kDK, kR>(target + r * DK, p, 1, r, Ahead{}, answer);
    } else if (target != nullptr) {
      fold_rows<kGate, kR, kDK>(from, target + r * DK, p.DK, p.factors, p.count, p.row + r, ahead);
      answer_block<kGate, kDK, kR>(target + r * DK, p, 0, r, Ahead{}, answer);
    } else {
      fold_rows<kGate, kR, kDK>(from, p.block, p.DK, p.factors, p.count, p.row + r, ahead);
      answer_block<kGate, kDK, kR>(p.block, p, 0, r, Ahead{}, answer);
    }
  });
}

// Calls f with DK as a type where it is one of the usual head sizes, with 0 otherwise: compiled in, the
// addresses of a block's rows are constants away from one pointer.
template <typename F>
inline void visit_width(int64_t DK, F&& f) {
  if (DK == 64) return f(std::integral_constant<int, 64>{});
  if (DK == 128) return f(std::integral_constant<int, 128>{});
  if (DK == 256) return f(std::integral_constant<int, 256>{});
  f(std::integral_constant<int, 0>{});
}

// answer(child, r, rows, sk, sq) ends a token's step on `rows` rows from row r of the pass: right after their
// dots, so that the next block is under way meanwhile.
template <Gate kGate, typename Source, typename Target, typename Answer>
inline void run_pass(const Source* source, Target* target, const Pass& p, Answer&& answer) {
  visit_width(p.DK, [&](auto width) {
    constexpr int kDK = decltype(width)::value;
    if (p.count != 1 || p.children != 1) {
      tree_pass<kGate, kDK>(source, target, p, answer);
    } else if (target != nullptr) {
      chain_pass<kGate, kDK, true>(source, target, p, answer);
    } else {
      chain_pass<kGate, kDK, false>(source, target, p, answer);
    }
  });
}

// Rows [row, row + rows) of a durable state take `count` factors in place; the next block is fetched.
template <Gate kGate, typename State>
inline void fold_pass(State* state, int64_t DK, int64_t row, int64_t rows, const Factor* factors,
                      int64_t count) {
  visit_width(DK, [&](auto width) {
    for_blocks(rows, [&](auto block_rows, int64_t r) {
      constexpr int kR = decltype(block_rows)::value;
      State* block = state + r * DK;
      const Ahead next{reinterpret_cast<const char*>(block + kR * DK), kR};
      fold_rows<kGate, kR, decltype(width)::value>(block, block, DK, factors, count, row + r, next);
    });
  });
}

template <Gate kGate>
struct GateTag {
  static constexpr Gate value = kGate;
};

// Calls f with the GateTag of `gate`.
template <typename F>
inline auto visit_gate(Gate gate, F&& f) {
  switch (gate) {
    case Gate::kHead:
      return f(GateTag<Gate::kHead>{});
    case Gate::kChannel:
      return f(GateTag<Gate::kChannel>{});
    case Gate::kNone:
      break;
  }
  return f(GateTag<Gate::kNone>{});
}

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Value rows of a work item: at most `bytes` of float32 state, fewer where the threads would not all get a
// tile.
inline int64_t tile_rows(const Recurrence& rec, int64_t B, int64_t bytes) {
  const int64_t fit = bytes / (rec.DK * static_cast<int64_t>(sizeof(float))) / kRows * kRows;
  const int64_t most = fit < kRows ? kRows : fit;
  const int64_t wanted = (2 * max_threads() + B * rec.HV - 1) / (B * rec.HV);
  const int64_t needed = (rec.DV + most - 1) / most;
  const int64_t tiles = needed < wanted ? wanted : needed;
  const int64_t rows = round_up((rec.DV + tiles - 1) / tiles, kRows);
  return rows < rec.DV ? rows : rec.DV;
}

// Sum of a b over [DK] in the order of the step.
inline float dot(const float* a, const float* b, int64_t DK) {
  Vec sum = Vec::zero();
  for (int64_t c = 0; c < DK; c += Vec::kWidth) sum = fma(Vec::load(a + c), Vec::load(b + c), sum);
  return hsum(sum);
}

// Decays that one node holds in one head: one number, or one per channel.
inline int64_t decay_size(const Recurrence& rec) {
  return rec.gate == Gate::kNone ? 0 : rec.gate == Gate::kHead ? 1 : rec.DK;
}

// decay = exp(g), `size` of them. A saturated gate (-inf too) gives 0.
inline void decay_of(const float* g, float* decay, int64_t size) {
  if (size == 1) {
    decay[0] = exp(g[0]);
    return;
  }
  for (int64_t c = 0; c < size; c += Vec::kWidth) exp(Vec::load(g + c)).store(decay + c);
}

}  // namespace specdec::cpu::SPECDEC_ISA
