// commit: the factors of an accepted path become part of the durable state, which is read once and written
// once.
//
// exact  applies them in token order with the operations of the step: bit-equal to decoding the tokens.
// fast   closed form: the decays of the path are multiplied first, S <- A S + sum_j u_j (w_j o k_j)^T, where
//        A is the decay of the whole path and w_j that of the tokens after j. Half the operations, another
//        rounding.
#include <algorithm>

#include "parallel.h"
#include "recurrence.h"
#include "scratch.h"
#include "specdec/sequences.h"
#include "stage.h"

namespace specdec::cpu::SPECDEC_ISA {

namespace {

constexpr int64_t kTileBytes = 64 * 1024;

// kR rows of the closed form. `decay` is A; factors carry w_j in their keys.
template <Gate kGate, int kR, typename State>
void fast_rows(State* state, int64_t DK, const Factor* factors, int64_t count, int64_t row,
               const float* decay) {
  for (int64_t c = 0; c < DK; c += Vec::kWidth) {
    const Vec a = detail::decay_chunk<kGate>(decay, c);
    Vec s[kR];
    for (int r = 0; r < kR; ++r) {
      s[r] = detail::decayed<kGate>(Vec::load(state + r * DK + c), a);
      __builtin_prefetch(state + (kR + r) * DK + c, 0, 2);
    }
    for (int64_t j = 0; j < count; ++j) {
      const Vec k = Vec::load(factors[j].k + c);
      for (int r = 0; r < kR; ++r) s[r] = fma(Vec::set(factors[j].u[row + r]), k, s[r]);
    }
    for (int r = 0; r < kR; ++r) store(state + r * DK + c, s[r]);
  }
}

// Factors of one head; what they point to lies in the workspace behind them.
struct HeadFactors {
  Factor* factors;  // [m]
  float* decays;    // [m, decay_size]
  float* keys;      // [m, DK], fast with a gate
  float* total;     // [decay_size], fast with a gate: A
};

// Turns factors into those of the closed form: k_j <- w_j o k_j, walking from the last token to the first.
void close_form(const CommitParams& p, int64_t b, int64_t hv, int64_t m, const HeadFactors& head) {
  const int64_t size = decay_size(p.rec), DK = p.rec.DK;
  if (size == 0) return;
  float* log_decay = head.total;  // sum of g over the tokens after j
  std::memset(log_decay, 0, size * sizeof(float));
  for (int64_t j = m - 1; j >= 0; --j) {
    float* decay = head.decays + j * size;
    float* keys = head.keys + j * DK;
    decay_of(log_decay, decay, size);
    for (int64_t c = 0; c < DK; c += Vec::kWidth) {
      const Vec w = size == 1 ? Vec::set(decay[0]) : Vec::load(decay + c);
      (w * Vec::load(head.factors[j].k + c)).store(keys + c);
    }
    head.factors[j].k = keys;
    const float* g = p.factors.g + ((b * p.factors.nodes + path_node(p.path, b, j)) * p.rec.HV + hv) * size;
    for (int64_t c = 0; c < size; ++c) log_decay[c] += g[c];
  }
  decay_of(log_decay, head.total, size);
}

template <Gate kGate, typename State>
void commit_tile(const CommitParams& p, int64_t slot, int64_t hv, int64_t row, int64_t rows, int64_t m,
                 const HeadFactors& head) {
  const int64_t DK = p.rec.DK;
  State* state = static_cast<State*>(p.state.data) + slot * p.state.slot_stride + (hv * p.rec.DV + row) * DK;
  if (p.mode == CommitMode::kExact) {
    fold_pass<kGate>(state, DK, row, rows, head.factors, m);
    return;
  }
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) {
    fast_rows<kGate, kRows>(state + r * DK, DK, head.factors, m, row + r, head.total);
  }
  for (; r < rows; ++r) fast_rows<kGate, 1>(state + r * DK, DK, head.factors, m, row + r, head.total);
}

template <Gate kGate, typename State>
void commit_range(const CommitParams& p, int64_t tile_rows, int64_t begin, int64_t end) {
  const int64_t DK = p.rec.DK, size = decay_size(p.rec);
  const int64_t most = std::min(p.path.max_length, p.factors.nodes);
  const int64_t records = round_up(most * static_cast<int64_t>(sizeof(Factor) / sizeof(float)), kLineFloats);
  const bool scaled = p.mode == CommitMode::kFast && size > 0;
  HeadFactors head;
  float* at = thread_scratch(records + round_up(most * size, kLineFloats) + round_up(size, kLineFloats) +
                             (scaled ? most * DK : 0));
  head.factors = reinterpret_cast<Factor*>(at);
  head.decays = at + records;
  head.total = head.decays + round_up(most * size, kLineFloats);
  head.keys = head.total + round_up(size, kLineFloats);

  const int64_t tiles = (p.rec.DV + tile_rows - 1) / tile_rows;
  int64_t staged = -1;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t b = i / (p.rec.HV * tiles);
    const int64_t hv = i / tiles % p.rec.HV;
    const int64_t slot = slot_of(p.slots, b);
    const int64_t m = path_length(p.path, b, p.factors.nodes);
    if (slot < 0 || m == 0) continue;
    if (i / tiles != staged) {
      for (int64_t j = 0; j < m; ++j) {
        head.factors[j] =
            stored_factor(p.rec, p.factors, b, path_node(p.path, b, j), hv, head.decays + j * size);
      }
      if (p.mode == CommitMode::kFast) close_form(p, b, hv, m, head);
      staged = i / tiles;
    }
    const int64_t row = i % tiles * tile_rows;
    commit_tile<kGate, State>(p, slot, hv, row, row + tile_rows <= p.rec.DV ? tile_rows : p.rec.DV - row, m,
                              head);
  }
}

template <Gate kGate, typename State>
void commit_all(const CommitParams& p) {
  const Recurrence& rec = p.rec;
  const int64_t rows = tile_rows(rec, p.B, kTileBytes);
  const int64_t items = p.B * rec.HV * ((rec.DV + rows - 1) / rows);
  parallel_ranges(items, p.B * rec.HV * rec.DV * rec.DK * (1 + p.path.max_length),
                  [&](int64_t begin, int64_t end) { commit_range<kGate, State>(p, rows, begin, end); });
}

}  // namespace

Status commit(const CommitParams& p) {
  const Recurrence& rec = p.rec;
  if (rec.HK <= 0 || rec.HV % rec.HK != 0) return Status::kInvalidArgument;
  if ((rec.gate == Gate::kNone) != (p.factors.g == nullptr)) return Status::kInvalidArgument;
  if (rec.DK % kKeyMultiple != 0 || p.state.dtype == DType::kFloat16) return Status::kUnsupported;
  if (p.B == 0 || rec.DV == 0 || p.path.max_length == 0) return Status::kOk;
  visit_gate(rec.gate, [&](auto gate) {
    if (p.state.dtype == DType::kBFloat16) {
      commit_all<decltype(gate)::value, bf16>(p);
    } else {
      commit_all<decltype(gate)::value, float>(p);
    }
  });
  return Status::kOk;
}

}  // namespace specdec::cpu::SPECDEC_ISA
