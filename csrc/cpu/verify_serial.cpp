// Serial and hybrid verification. Value rows are independent, so a thread takes tiles of rows that stay in
// its first cache while all tokens pass over them: the state is read from memory once, whatever N is, and
// written only where pending factors are folded in. More threads than heads are fed by thinner tiles, not by
// chains of the tree, which would need a barrier a wave.
#include "verify_serial.h"

#include "parallel.h"
#include "path.h"
#include "scratch.h"
#include "stage.h"
#include "verify_plan.h"

namespace specdec::cpu::SPECDEC_ISA {

namespace {

constexpr int64_t kTileBytes = 16 * 1024;    // of float32 state: leaves room in L1 for k and q
constexpr int64_t kStreamBytes = 64 * 1024;  // of a tile that is read once

// What a thread prepared for its current sequence and head.
struct Workspace {
  float* k;             // [N, DK]
  float* q;             // [N, DK], scaled
  float* kq;            // [N]
  float* decay;         // [N, decay_size]
  float* stored_decay;  // [prefix nodes or pending factors, decay_size]
  Factor* pending;      // [pending factors]
  Factor* nodes;        // [prefix nodes, then new nodes]
  float* sk;            // [children, sum_stride]
  float* sq;
  float* slots;  // [slots, rows, DK]
};

struct Sequence {
  int64_t b, slot, length, pending_count;
};

Sequence sequence_of(const VerifyParams& p, int64_t b) {
  Sequence s{b, p.slots != nullptr ? p.slots[b] : b, p.N, 0};
  if (s.slot < 0) {
    s.length = 0;
    return s;
  }
  if (p.lengths != nullptr) s.length = p.lengths[b] < 0 ? 0 : p.lengths[b] > p.N ? p.N : p.lengths[b];
  if (p.has_pending) s.pending_count = path_length(p.pending_path, b);
  return s;
}

// Rows [row, row + count) of one value head: the end of a token's step.
template <Update kUpdate, typename T>
void finish(const VerifyParams& p, int64_t b, int64_t n, int64_t hv, int64_t row, int64_t count, float decay,
            float kq, const float* sk, const float* sq) {
  const T* v = static_cast<const T*>(p.v) + b * p.v_stride.b + n * p.v_stride.n + hv * p.v_stride.h + row;
  const int64_t at = ((b * p.N + n) * p.rec.HV + hv) * p.rec.DV + row;
  float* u = p.u_out + at;
  T* out = static_cast<T*>(p.out) + at;
  const float beta = kUpdate == Update::kDelta
                         ? p.beta[b * p.beta_stride.b + n * p.beta_stride.n + hv * p.beta_stride.h]
                         : 0.0f;
  int64_t r = 0;
  for (; r + Vec::kWidth <= count; r += Vec::kWidth) {
    Vec write = Vec::load(v + r);
    if (kUpdate == Update::kDelta) write = Vec::set(beta) * (write - Vec::set(decay) * Vec::load(sk + r));
    write.store(u + r);
    store(out + r, Vec::set(decay) * Vec::load(sq + r) + write * Vec::set(kq));
  }
  for (; r < count; ++r) {
    float write = to_float(v[r]);
    if (kUpdate == Update::kDelta) write = beta * (write - decay * sk[r]);
    u[r] = write;
    out[r] = from_float<T>(decay * sq[r] + write * kq);
  }
}

using Finish = decltype(&finish<Update::kDelta, float>);

template <typename T>
Finish finish_for(Update update) {
  return update == Update::kDelta ? &finish<Update::kDelta, T> : &finish<Update::kAdditive, T>;
}

template <Gate kGate, typename State>
class Verifier {
 public:
  Verifier(const VerifyParams& p, int64_t rows)
      : p_(p),
        rows_(rows),
        tiles_((p.rec.DV + rows - 1) / rows),
        sum_stride_(round_up(rows, Vec::kWidth)),
        decays_(decay_size(p.rec)),
        prefix_(p.has_prefix ? p.prefix.nodes : 0),
        finish_(visit_dtype(p.dtype, [&](auto tag) { return finish_for<decltype(tag)>(p.rec.update); })) {}

  // Work is counted in units; every tile of sequence b takes cost(b) of them, about one a pass.
  int64_t units() const {
    int64_t sum = 0;
    for (int64_t b = 0; b < p_.B; ++b) sum += cost(b) * tiles();
    return sum;
  }

  // The tiles that start in the units [begin, end).
  void run(int64_t begin, int64_t end) const {
    int64_t unit = 0;
    for (int64_t b = 0; b < p_.B && unit < end; ++b) {
      const int64_t each = cost(b);
      const int64_t first = unit >= begin ? 0 : (begin - unit + each - 1) / each;
      const int64_t last = (end - unit + each - 1) / each;
      run_sequence(sequence_of(p_, b), first, last < tiles() ? last : tiles());
      unit += each * tiles();
    }
  }

 private:
  int64_t tiles() const { return p_.rec.HV * tiles_; }

  int64_t cost(int64_t b) const {
    const Sequence s = sequence_of(p_, b);
    return s.slot < 0 ? 1 : 2 + 2 * s.length + prefix_ + s.pending_count;
  }

  void run_sequence(const Sequence& s, int64_t first, int64_t last) const {
    if (first >= last) return;
    VerifyPlan plan;
    plan.slots = 0;
    if (s.slot >= 0) {
      plan_verify(p_.strategy, p_.parents != nullptr ? p_.parents + s.b * p_.N : nullptr,
                  static_cast<int>(s.length),
                  p_.prefix_parents != nullptr ? p_.prefix_parents + s.b * prefix_ : nullptr,
                  static_cast<int>(prefix_), &plan);
    }
    const Workspace w = workspace(s, plan);
    const int64_t DK = p_.rec.DK;
    int64_t staged_hk = -1, staged_hv = -1;
    for (int64_t tile = first; tile < last; ++tile) {
      const int64_t hv = tile / tiles_;
      const int64_t hk = hv / (p_.rec.HV / p_.rec.HK);
      const int64_t row = tile % tiles_ * rows_;
      const int64_t rows = row + rows_ <= p_.rec.DV ? rows_ : p_.rec.DV - row;
      if (hk != staged_hk) {
        stage_rows(p_, s.b, 0, s.length, hk, w.k, w.q);
        for (int64_t n = 0; n < s.length; ++n) w.kq[n] = dot(w.k + n * DK, w.q + n * DK, DK);
      }
      if (hv != staged_hv) stage_head(s, hv, w);
      staged_hk = hk;
      staged_hv = hv;
      if (s.slot >= 0) run_tile(s, hv, row, rows, plan, w);
      if (row == 0) write_head_factors(p_, s.b, s.length, hv, w.k);
      clear_padding(p_, s.b, s.length, hv, row, rows);
    }
  }

  Workspace workspace(const Sequence& s, const VerifyPlan& plan) const {
    const int64_t N = p_.N, DK = p_.rec.DK;
    const int64_t stored = prefix_ + s.pending_count;
    const int64_t line = 16;  // floats of a cache line
    const int64_t keys = round_up(N * DK, line), decays = round_up(N * decays_, line);
    const int64_t stored_decays = round_up(stored * decays_, line), sums = N * sum_stride_;
    const int64_t records =
        round_up((stored + prefix_ + N) * static_cast<int64_t>(sizeof(Factor) / sizeof(float)), line);
    float* at = thread_scratch(2 * keys + round_up(N, line) + decays + stored_decays + records + 2 * sums +
                               plan.slots * rows_ * DK);
    const auto take = [&at](int64_t count) {
      float* part = at;
      at += count;
      return part;
    };
    Workspace w;
    w.slots = take(plan.slots * rows_ * DK);
    w.k = take(keys);
    w.q = take(keys);
    w.kq = take(round_up(N, line));
    w.decay = take(decays);
    w.stored_decay = take(stored_decays);
    w.pending = reinterpret_cast<Factor*>(take(records));
    w.nodes = w.pending + s.pending_count;
    w.sk = take(sums);
    w.sq = take(sums);
    return w;
  }

  // Decays and factor addresses of value head hv.
  void stage_head(const Sequence& s, int64_t hv, const Workspace& w) const {
    stage_decays(p_, s.b, 0, s.length, hv, w.decay);
    for (int64_t i = 0; i < s.pending_count; ++i) {
      w.pending[i] = stored_factor(p_.rec, p_.pending, s.b, path_node(p_.pending_path, s.b, i), hv,
                                   w.stored_decay + i * decays_);
    }
    if (s.slot < 0) return;
    for (int64_t i = 0; i < prefix_; ++i) {
      w.nodes[i] = stored_factor(p_.rec, p_.prefix, s.b, i, hv, w.stored_decay + i * decays_);
    }
    for (int64_t n = 0; n < s.length; ++n) {
      w.nodes[prefix_ + n] = Factor{p_.u_out + ((s.b * p_.N + n) * p_.rec.HV + hv) * p_.rec.DV,
                                    w.k + n * p_.rec.DK, w.decay + n * decays_};
    }
  }

  void run_tile(const Sequence& s, int64_t hv, int64_t row, int64_t rows, const VerifyPlan& plan,
                const Workspace& w) const {
    const int64_t DK = p_.rec.DK;
    State* durable =
        static_cast<State*>(p_.state.data) + s.slot * p_.state.slot_stride + (hv * p_.rec.DV + row) * DK;
    const auto slot = [&](int16_t i) { return i >= 0 ? w.slots + i * rows_ * DK : nullptr; };
    Factor factors[kMaxSerialNodes];
    Probe probes[kMaxSerialNodes];
    for (int i = 0; i < plan.steps_count; ++i) {
      const PlanStep& step = plan.steps[i];
      const int16_t* children = plan.children + step.first_child;
      for (int j = 0; j < step.factors; ++j) factors[j] = w.nodes[plan.factors[step.first_factor + j]];
      for (int c = 0; c < step.children; ++c) {
        const int64_t n = children[c] - prefix_;
        probes[c] = Probe{w.k + n * DK, w.q + n * DK, w.decay + n * decays_};
      }
      const Pass pass{DK,
                      rows,
                      row,
                      factors,
                      step.factors,
                      probes,
                      step.children,
                      w.sk,
                      w.sq,
                      sum_stride_,
                      ahead_of(durable, rows, i, plan)};
      if (i == 0 && s.pending_count > 0) {
        Pass fold = pass;
        fold.factors = w.pending;
        fold.count = s.pending_count;
        run_pass<kGate>(durable, durable, fold);
      } else if (step.source >= 0) {
        run_pass<kGate>(slot(step.source), slot(step.target), pass);
      } else {
        run_pass<kGate>(durable, slot(step.target), pass);
      }
      for (int c = 0; c < step.children; ++c) {
        const int64_t n = children[c] - prefix_;
        finish_(p_, s.b, n, hv, row, rows, kGate == Gate::kHead ? w.decay[n] : 1.0f, w.kq[n],
                w.sk + c * sum_stride_, w.sq + c * sum_stride_);
      }
    }
  }

  // A lone pass streams and fetches its next block. Where more passes follow, they share the rows of the next
  // tile, which lies behind this one.
  Ahead ahead_of(const State* durable, int64_t rows, int i, const VerifyPlan& plan) const {
    const int64_t DK = p_.rec.DK;
    const int passes = plan.steps_count - 1;
    if (passes == 0) return {reinterpret_cast<const char*>(durable + kRows * DK), kRows};
    const int64_t share = (kRows + passes - 1) / passes;
    const int64_t first = (i - 1) * share;
    if (i == 0 || first >= kRows) return {};
    return {reinterpret_cast<const char*>(durable + (rows + first) * DK),
            share < kRows - first ? share : kRows - first};
  }

  const VerifyParams& p_;
  const int64_t rows_, tiles_, sum_stride_, decays_, prefix_;
  const Finish finish_;
};

template <Gate kGate, typename State>
void verify_all(const VerifyParams& p) {
  const bool once = p.N <= 1 && !p.has_prefix;
  const int64_t rows = tile_rows(p.rec, p.B, once ? kStreamBytes : kTileBytes);
  const Verifier<kGate, State> verifier(p, rows);
  const int64_t units = verifier.units();
  parallel_ranges(units, units * rows * p.rec.DK,
                  [&](int64_t begin, int64_t end) { verifier.run(begin, end); });
}

}  // namespace

Status verify_serial(const VerifyParams& p) {
  const int64_t nodes = p.N + (p.has_prefix ? p.prefix.nodes : 0);
  if (nodes > kMaxSerialNodes || p.rec.DK % kKeyMultiple != 0) return Status::kUnsupported;
  if (p.state.dtype == DType::kFloat16) return Status::kUnsupported;
  if (p.B == 0 || p.rec.DV == 0) return Status::kOk;
  visit_gate(p.rec.gate, [&](auto gate) {
    if (p.state.dtype == DType::kBFloat16) {
      verify_all<decltype(gate)::value, bf16>(p);
    } else {
      verify_all<decltype(gate)::value, float>(p);
    }
  });
  return Status::kOk;
}

}  // namespace specdec::cpu::SPECDEC_ISA
