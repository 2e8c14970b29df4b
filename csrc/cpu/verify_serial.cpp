// Serial and hybrid verification. Value rows are independent, so a thread takes tiles of rows that stay in
// its first cache while all tokens pass over them: the state is read from memory once, whatever N is, and
// written only where pending factors are folded in. More threads than heads are fed by thinner tiles, not by
// chains of the tree, which would need a barrier a wave.
#include "verify_serial.h"

#include <optional>

#include "finish_layer.h"
#include "layer_tokens.h"
#include "parallel.h"
#include "rows.h"
#include "scratch.h"
#include "specdec/sequences.h"
#include "verify_outputs.h"
#include "verify_plan.h"

namespace specdec::cpu::SPECDEC_ISA {

namespace {

constexpr int64_t kTileBytes = 16 * 1024;  // of float32 state: leaves room in L1 for k and q
// Floats between states and tokens: a chunk of k or q at the low address bits of a state chunk that was just
// stored would wait for the store (4 KiB aliasing).
constexpr int64_t kApart = 64;
constexpr int64_t kStreamBytes = 64 * 1024;  // of a tile that is read once

// What ends the steps of one token in one value head.
struct Token {
  const void* v;  // [DV]
  float* u;       // [DV]
  void* out;      // [DV]
  float beta, decay, kq;
};

// What a thread prepared for its current sequence and head. Steps of the plan read ranges of the lists.
struct Workspace {
  float* k;             // [N, DK]
  float* q;             // [N, DK], scaled
  float* kq;            // [N]
  float* decay;         // [N, decay_size]
  float* stored_decay;  // [prefix nodes or pending factors, decay_size]
  Factor* pending;      // [pending factors]
  Factor* factors;      // [prefix nodes + new nodes], as VerifyPlan::factors
  Probe* probes;        // [new nodes], as VerifyPlan::children
  Token* tokens;        // [new nodes], as VerifyPlan::children
  float* block;         // [kRows, DK]
  float* slots;         // [slots, rows, DK]
  float* layer;         // LayerTokens::floats
};

struct Sequence {
  int64_t b, slot, length, pending_count;
};

Sequence sequence_of(const VerifyParams& p, int64_t b) {
  Sequence s{b, slot_of(p.slots, b), 0, 0};
  if (s.slot < 0) return s;
  s.length = valid_length(p.lengths, b, p.N);
  if (p.has_pending) s.pending_count = path_length(p.pending_path, b, p.pending.nodes);
  return s;
}

// Rows [row, row + count), at most a vector of them, from the dots of the parent's state.
template <Update kUpdate, typename T>
inline void answer(const Token& token, int64_t row, int64_t count, Vec sk, Vec sq) {
  Vec u = load_some(static_cast<const T*>(token.v) + row, count);
  if (kUpdate == Update::kDelta) {
    u = Vec::set(token.beta) * (u - Vec::set(token.decay) * sk);
  }
  store_some(token.u + row, u, count);
  const Vec out = Vec::set(token.decay) * sq + u * Vec::set(token.kq);
  store_some(static_cast<T*>(token.out) + row, out, count);
}

using Answer = decltype(&answer<Update::kDelta, float>);

template <typename T>
Answer answer_for(Update update) {
  return update == Update::kDelta ? &answer<Update::kDelta, T> : &answer<Update::kAdditive, T>;
}

template <Gate kGate, typename State>
class Verifier {
 public:
  // With `tokens` p is what they make; `finish` hears of the tiles that are done. Either may be null.
  Verifier(const VerifyParams& p, int64_t rows, LayerTokens* tokens = nullptr, FinishLayer* finish = nullptr)
      : p_(p),
        tokens_(tokens),
        finish_(finish),
        rows_(rows),
        tiles_((p.rec.DV + rows - 1) / rows),
        decays_(decay_size(p.rec)),
        prefix_(p.has_prefix ? p.prefix.nodes : 0),
        answer_(visit_dtype(p.dtype, [&](auto tag) { return answer_for<decltype(tag)>(p.rec.update); })) {}

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
    if (tokens_ != nullptr) tokens_->start(s.b, s.slot, s.length, w.layer);
    const int64_t DK = p_.rec.DK;
    int64_t staged_hk = -1, staged_hv = -1;
    for (int64_t tile = first; tile < last; ++tile) {
      const int64_t hv = tile / tiles_;
      const int64_t hk = hv / (p_.rec.HV / p_.rec.HK);
      const int64_t row = tile % tiles_ * rows_;
      const int64_t rows = row + rows_ <= p_.rec.DV ? rows_ : p_.rec.DV - row;
      if (hk != staged_hk) {
        if (tokens_ != nullptr) tokens_->key_head(hk);
        stage_rows(p_, s.b, 0, s.length, hk, w.k, w.q);
        for (int64_t n = 0; n < s.length; ++n) w.kq[n] = dot(w.k + n * DK, w.q + n * DK, DK);
      }
      if (hv != staged_hv) {
        if (tokens_ != nullptr) tokens_->value_head(hv);
        stage_head(s, hv, plan, w);
      }
      staged_hk = hk;
      staged_hv = hv;
      if (s.slot >= 0) run_tile(s, hv, row, rows, plan, w);
      if (row == 0) write_head_factors(p_, s.b, s.length, hv, w.k);
      clear_padding(p_, s.b, s.length, hv, row, rows);
      const bool last_here = tile + 1 == last || (tile + 1) % tiles_ == 0;
      if (finish_ != nullptr && last_here) {
        finish_->add(s.b, s.slot, s.length, hv, tile + 1 - std::max(first, hv * tiles_));
      }
    }
  }

  Workspace workspace(const Sequence& s, const VerifyPlan& plan) const {
    const int64_t N = p_.N, DK = p_.rec.DK;
    const int64_t stored = prefix_ + s.pending_count;
    const int64_t keys = round_up(N * DK, kLineFloats), decays = round_up(N * decays_, kLineFloats);
    const int64_t stored_decays = round_up(stored * decays_, kLineFloats);
    const auto records = [&](int64_t count, size_t bytes) {
      return round_up(count * static_cast<int64_t>(bytes / sizeof(float)), kLineFloats);
    };
    const int64_t factors = records(stored + N, sizeof(Factor));
    const int64_t probes = records(N, sizeof(Probe)), tokens = records(N, sizeof(Token));
    float* at = thread_scratch((plan.slots * rows_ + kRows) * DK + kApart + 2 * keys +
                               round_up(N, kLineFloats) + decays + stored_decays + factors + probes + tokens +
                               (tokens_ != nullptr ? tokens_->floats() : 0));
    const auto take = [&at](int64_t count) {
      float* part = at;
      at += count;
      return part;
    };
    Workspace w;
    w.slots = take(plan.slots * rows_ * DK);
    w.block = take(kRows * DK);
    take(kApart);
    w.k = take(keys);
    w.q = take(keys);
    w.kq = take(round_up(N, kLineFloats));
    w.decay = take(decays);
    w.stored_decay = take(stored_decays);
    w.pending = reinterpret_cast<Factor*>(take(factors));
    w.factors = w.pending + s.pending_count;
    w.probes = reinterpret_cast<Probe*>(take(probes));
    w.tokens = reinterpret_cast<Token*>(take(tokens));
    w.layer = at;
    return w;
  }

  // Decays, factors, probes and tokens of value head hv.
  void stage_head(const Sequence& s, int64_t hv, const VerifyPlan& plan, const Workspace& w) const {
    const int64_t DK = p_.rec.DK;
    stage_decays(p_, s.b, 0, s.length, hv, w.decay);
    for (int64_t i = 0; i < s.pending_count; ++i) {
      w.pending[i] = stored_factor(p_.rec, p_.pending, s.b, path_node(p_.pending_path, s.b, i), hv,
                                   w.stored_decay + i * decays_);
    }
    if (s.slot < 0) return;
    const auto row_of = [&](int64_t n) { return ((s.b * p_.N + n) * p_.rec.HV + hv) * p_.rec.DV; };
    for (int i = 0; i < plan.factors_count; ++i) {
      const int64_t node = plan.factors[i], n = node - prefix_;
      w.factors[i] = n < 0 ? stored_factor(p_.rec, p_.prefix, s.b, node, hv, w.stored_decay + node * decays_)
                           : Factor{p_.u_out + row_of(n), w.k + n * DK, w.decay + n * decays_};
    }
    visit_dtype(p_.dtype, [&](auto tag) {
      using T = decltype(tag);
      for (int64_t i = 0; i < s.length; ++i) {
        const int64_t n = plan.children[i] - prefix_;
        const auto in = [&](const Strides& stride) { return s.b * stride.b + n * stride.n + hv * stride.h; };
        w.probes[i] = Probe{w.k + n * DK, w.q + n * DK, w.decay + n * decays_};
        w.tokens[i] = Token{static_cast<const T*>(p_.v) + in(p_.v_stride),
                            p_.u_out + row_of(n),
                            static_cast<T*>(p_.out) + row_of(n),
                            p_.beta != nullptr ? p_.beta[in(p_.beta_stride)] : 0.0f,
                            kGate == Gate::kHead ? w.decay[n] : 1.0f,
                            w.kq[n]};
      }
    });
  }

  void run_tile(const Sequence& s, int64_t hv, int64_t row, int64_t rows, const VerifyPlan& plan,
                const Workspace& w) const {
    const int64_t DK = p_.rec.DK;
    State* durable =
        static_cast<State*>(p_.state.data) + s.slot * p_.state.slot_stride + (hv * p_.rec.DV + row) * DK;
    const auto slot = [&](int16_t i) { return i >= 0 ? w.slots + i * rows_ * DK : nullptr; };
    for (int i = 0; i < plan.steps_count; ++i) {
      const PlanStep& step = plan.steps[i];
      const bool fold = i == 0 && s.pending_count > 0;
      const Pass pass{DK,
                      rows,
                      row,
                      fold ? w.pending : w.factors + step.first_factor,
                      fold ? s.pending_count : step.factors,
                      w.probes + step.first_child,
                      step.children,
                      w.block,
                      ahead_of(durable, rows, i, plan)};
      const Token* tokens = w.tokens + step.first_child;
      for (int c = 0; c < step.children; ++c) fetch_token(tokens[c], row + rows);
      const auto answer = [&](int64_t child, int64_t r, int64_t count, Vec sk, Vec sq) {
        answer_(tokens[child], row + r, count, sk, sq);
      };
      if (fold) {
        run_pass<kGate>(durable, durable, pass, answer);
      } else if (step.source >= 0) {
        run_pass<kGate>(slot(step.source), slot(step.target), pass, answer);
      } else {
        run_pass<kGate>(durable, slot(step.target), pass, answer);
      }
    }
  }

  // What a step ends with lies a head apart from token to token and was last touched a layer ago: a miss
  // would hold up the next token, a missed store every store behind it.
  void fetch_token(const Token& token, int64_t row) const {
    const int64_t size = p_.dtype == DType::kFloat32 ? 4 : 2;
    __builtin_prefetch(static_cast<const char*>(token.v) + row * size, 0, 3);
    __builtin_prefetch(token.u + row, 1, 3);
    __builtin_prefetch(static_cast<const char*>(token.out) + row * size, 1, 3);
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
  LayerTokens* const tokens_;
  FinishLayer* const finish_;
  const int64_t rows_, tiles_, decays_, prefix_;
  const Answer answer_;
};

// `layer`: what is around p, null for nothing.
template <Gate kGate, typename State>
void verify_all(const VerifyParams& p, const VerifyLayerParams* layer) {
  const bool once = p.N <= 1 && !p.has_prefix;
  const int64_t bytes = once ? kStreamBytes : kTileBytes;
  const int64_t rows = tile_rows(p.rec, p.B, bytes);
  const Verifier<kGate, State> verifier(p, rows);
  const int64_t units = verifier.units(), work = units * rows * p.rec.DK;
  if (layer == nullptr) {
    parallel_ranges(units, work, [&](int64_t begin, int64_t end) { verifier.run(begin, end); });
    return;
  }
  FinishLayer finish(*layer, (p.rec.DV + rows - 1) / rows);
  parallel_ranges(units, work, [&](int64_t begin, int64_t end) {
    std::optional<LayerTokens> tokens;
    if (layer->has_prologue) tokens.emplace(*layer);
    Verifier<kGate, State>(tokens ? tokens->params() : p, rows, tokens ? &*tokens : nullptr, &finish)
        .run(begin, end);
  });
}

Status verify_serial(const VerifyParams& p, const VerifyLayerParams* layer) {
  const int64_t nodes = p.N + (p.has_prefix ? p.prefix.nodes : 0);
  if (nodes > kMaxSerialNodes || p.rec.DK % kKeyMultiple != 0) return Status::kUnsupported;
  if (p.state.dtype == DType::kFloat16) return Status::kUnsupported;
  if (p.B == 0 || p.rec.DV == 0) return Status::kOk;
  visit_gate(p.rec.gate, [&](auto gate) {
    if (p.state.dtype == DType::kBFloat16) {
      verify_all<decltype(gate)::value, bf16>(p, layer);
    } else {
      verify_all<decltype(gate)::value, float>(p, layer);
    }
  });
  return Status::kOk;
}

}  // namespace

Status verify_serial(const VerifyParams& p) { return verify_serial(p, nullptr); }
Status verify_serial(const VerifyLayerParams& p) { return verify_serial(p.verify, &p); }

}  // namespace specdec::cpu::SPECDEC_ISA
