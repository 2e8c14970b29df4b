// The step of the recurrence on a few value rows: "The step, to the bit" of docs/architecture.md.
// Verification, commits, pending factors and prefix replay are all built from step_rows, so their bits agree.
//
// A pass over the state rows applies the factors that lead to a node (a decode step has one, a commit has
// many) and takes the dots of the next token in the same load:
//
//   per chunk:   S <- fma(u_j, k_j, a_j S) for every factor j;   sk += S k;   sq += S q
//
// Per 16 state elements and token that is four vector operations, one load and at most one store. One
// accumulator a row and dot, chunks in ascending order, lanes in the order of hsum: a sum depends on DK and
// the vector width alone.
#pragma once

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

enum class Factors { kNone, kOne, kMany };

namespace detail {

template <Gate kGate>
inline Vec decayed(Vec s, const float* decay, int64_t c) {
  if constexpr (kGate == Gate::kHead) return Vec::set(decay[0]) * s;
  if constexpr (kGate == Gate::kChannel) return Vec::load(decay + c) * s;
  return s;
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

// kR rows of `source` [kR, DK], DK known at compile time where kDK > 0; the advanced rows go to `target` (may
// be `source`; null: nobody reads them). `row` is the first row's index in the head, sk and sq [kR] receive
// the dots of `probe`.
template <Gate kGate, int kR, int kDK, Factors kFactors, bool kDots, typename Source, typename Target>
inline void step_rows(const Source* source, Target* target, int64_t dk, const Factor* factors, int64_t count,
                      int64_t row, const Probe& probe, float* sk, float* sq, const Ahead& ahead) {
  const int64_t DK = kDK > 0 ? kDK : dk;
  Vec sums[2 * kR];
  if constexpr (kDots) {
    for (int i = 0; i < 2 * kR; ++i) sums[i] = Vec::zero();
  }
  Vec u[kR];
  if constexpr (kFactors == Factors::kOne) {
    for (int r = 0; r < kR; ++r) u[r] = Vec::set(factors[0].u[row + r]);
  }
  for (int64_t c = 0; c < DK; c += Vec::kWidth) {
    Vec s[kR];
    for (int r = 0; r < kR; ++r) s[r] = Vec::load(source + r * DK + c);
    for (int64_t r = 0; r < ahead.rows; ++r) {
      __builtin_prefetch(ahead.at + (r * DK + c) * static_cast<int64_t>(sizeof(Source)), 0, 2);
    }
    if constexpr (kFactors == Factors::kOne) {
      const Vec k = Vec::load(factors[0].k + c);
      for (int r = 0; r < kR; ++r) s[r] = fma(u[r], k, detail::decayed<kGate>(s[r], factors[0].decay, c));
    }
    if constexpr (kFactors == Factors::kMany) {
      for (int64_t j = 0; j < count; ++j) {
        const Vec k = Vec::load(factors[j].k + c);
        const float* uj = factors[j].u + row;
        for (int r = 0; r < kR; ++r) {
          s[r] = fma(Vec::set(uj[r]), k, detail::decayed<kGate>(s[r], factors[j].decay, c));
        }
      }
    }
    if (target != nullptr) {
      for (int r = 0; r < kR; ++r) s[r] = detail::written(target + r * DK + c, s[r]);
    }
    if constexpr (kDots) {
      const Vec k = Vec::load(probe.k + c);
      const Vec q = Vec::load(probe.q + c);
      for (int r = 0; r < kR; ++r) {
        if constexpr (kGate == Gate::kChannel) s[r] = detail::decayed<kGate>(s[r], probe.decay, c);
        sums[r] = fma(s[r], k, sums[r]);
        sums[kR + r] = fma(s[r], q, sums[kR + r]);
      }
    }
  }
  if constexpr (kDots) {
    if constexpr (2 * kR == Vec::kWidth) {
      float lanes[2 * kR];
      hsum_all(sums).store(lanes);
      std::memcpy(sk, lanes, kR * sizeof(float));
      std::memcpy(sq, lanes + kR, kR * sizeof(float));
    } else {
      for (int r = 0; r < kR; ++r) {
        sk[r] = hsum(sums[r]);
        sq[r] = hsum(sums[kR + r]);
      }
    }
  }
}

// step_rows with the number of factors known only now.
template <Gate kGate, int kR, int kDK, bool kDots, typename Source, typename Target>
inline void step_rows(const Source* source, Target* target, int64_t DK, const Factor* factors, int64_t count,
                      int64_t row, const Probe& probe, float* sk, float* sq, const Ahead& ahead) {
  if (count == 0) {
    step_rows<kGate, kR, kDK, Factors::kNone, kDots>(source, target, DK, factors, count, row, probe, sk, sq,
                                                     ahead);
  } else if (count == 1) {
    step_rows<kGate, kR, kDK, Factors::kOne, kDots>(source, target, DK, factors, count, row, probe, sk, sq,
                                                    ahead);
  } else {
    step_rows<kGate, kR, kDK, Factors::kMany, kDots>(source, target, DK, factors, count, row, probe, sk, sq,
                                                     ahead);
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
  float* sk;  // [children, sum_stride]
  float* sq;
  int64_t sum_stride;
  Ahead ahead;  // laid out as the source of the pass
};

// The first child is answered while its parent's rows are in registers, the others from the block just
// written, which is still in the first cache: with two children or more and any factor, `target` must be
// given.
template <Gate kGate, int kR, int kDK, typename Source, typename Target>
inline void run_block(const Source* source, Target* target, const Pass& p, int64_t r) {
  source += r * p.DK;
  if (target != nullptr) target += r * p.DK;
  const Ahead ahead{p.ahead.at + r * p.DK * static_cast<int64_t>(sizeof(Source)), p.ahead.rows};
  if (p.children == 0) {
    if (p.count > 0) {
      step_rows<kGate, kR, kDK, false>(source, target, p.DK, p.factors, p.count, p.row + r, Probe{}, nullptr,
                                       nullptr, ahead);
    }
    return;
  }
  step_rows<kGate, kR, kDK, true>(source, target, p.DK, p.factors, p.count, p.row + r, p.probes[0], p.sk + r,
                                  p.sq + r, ahead);
  const auto answer = [&](const auto* rows, int64_t c) {
    step_rows<kGate, kR, kDK, Factors::kNone, true>(rows, static_cast<float*>(nullptr), p.DK, nullptr, 0, 0,
                                                    p.probes[c], p.sk + c * p.sum_stride + r,
                                                    p.sq + c * p.sum_stride + r, Ahead{});
  };
  for (int64_t c = 1; c < p.children; ++c) {
    if (target != nullptr) {
      answer(target, c);
    } else {
      answer(source, c);
    }
  }
}

template <Gate kGate, int kDK, typename Source, typename Target>
inline void run_blocks(const Source* source, Target* target, const Pass& p) {
  for (int64_t r = 0; r + kRows <= p.rows; r += kRows) run_block<kGate, kRows, kDK>(source, target, p, r);
}

// The usual head sizes are compiled in: the addresses of a block's rows are then constants away from one
// pointer.
template <Gate kGate, typename Source, typename Target>
inline void run_pass(const Source* source, Target* target, const Pass& p) {
  switch (p.DK) {
    case 64:
      run_blocks<kGate, 64>(source, target, p);
      break;
    case 128:
      run_blocks<kGate, 128>(source, target, p);
      break;
    case 256:
      run_blocks<kGate, 256>(source, target, p);
      break;
    default:
      run_blocks<kGate, 0>(source, target, p);
  }
  for (int64_t r = p.rows / kRows * kRows; r < p.rows; ++r) run_block<kGate, 1, 0>(source, target, p, r);
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
