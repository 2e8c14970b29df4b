// prefill: whole sequences, chunk by chunk, through the UT transform (ut_transform.h). A work item is a
// sequence, a value head and a group of its panels of kPanel value rows. The item's state is kept transposed,
// [panel][DK, kPanel], over all chunks, so that each of the three products with it runs over contiguous value
// columns:
//
//   K S and Q S   [n, DK] x [DK, kPanel]        S <- e^G S + K^T U   [DK, n] x [n, kPanel]
//
// Items share nothing and every sum has a fixed order: a sequence's numbers depend on itself alone.
#include <algorithm>
#include <initializer_list>

#include "parallel.h"
#include "scratch.h"
#include "specdec/sequences.h"
#include "ut_transform.h"

namespace specdec::cpu::SPECDEC_ISA {

namespace {

// Tokens of a chunk. Work inside the chunk grows with it, reading and writing the state falls: measured, 32
// and 64 are equal with a gate per head, and 32 is a fifth faster with one per channel.
constexpr int64_t kChunk = 32;
static_assert(kChunk % kPanel == 0);

// Where a sequence lies in q, k, v, g, beta and out.
struct Sequence {
  int64_t slot, row, first, tokens;
  int64_t room;  // tokens of `out` that belong to it; those beyond `tokens` are zero
};

int64_t clamp_to(int64_t x, int64_t most) { return x < 0 ? 0 : x > most ? most : x; }

Sequence sequence_of(const PrefillParams& p, int64_t b) {
  Sequence s{slot_of(p.slots, b), b, 0, p.T, p.T};
  if (p.cu_seqlens != nullptr) {
    s.row = 0;
    s.first = clamp_to(p.cu_seqlens[b], p.T);
    s.room = s.tokens = clamp_to(p.cu_seqlens[b + 1] - s.first, p.T - s.first);
  } else {
    s.tokens = valid_length(p.lengths, b, p.T);
  }
  if (s.slot < 0) s.tokens = 0;
  return s;
}

class Prefiller {
 public:
  Prefiller(const PrefillParams& p, int64_t panels)
      : p_(p),
        DK_(p.rec.DK),
        panels_(panels),
        delta_(p.rec.update == Update::kDelta),
        channel_(p.rec.gate == Gate::kChannel) {
    const int64_t rows = kChunk * DK_;
    int64_t size = 0;
    const auto place = [&size](int64_t count) {
      const int64_t offset = size;
      size += round_up(count, 16);  // a cache line
      return offset;
    };
    state_ = place(panels_ * DK_ * kPanel);
    k_ = place(rows);
    q_ = place(rows);
    k_reach_ = place(channel_ ? rows : 0);
    q_reach_ = place(channel_ ? rows : 0);
    k_write_ = place(channel_ ? rows : 0);
    decay_ = place(kChunk * decay_size(p.rec));
    beta_ = place(kChunk);
    reach_ = place(kChunk);
    tail_ = place(kChunk);
    total_ = place(DK_);
    transposed_ = place(channel_ ? 0 : rows);
    gram_k_ = place(kChunk * kChunk);
    gram_q_ = place(kChunk * kChunk);
    decays_ = place(kChunk * kChunk);
    write_ = place(kChunk * kChunk);
    read_ = place(kChunk * kChunk);
    u_ = place(kChunk * kPanel);
    o_ = place(kChunk * kPanel);
    wide_ = place(kPanel * DK_);
    size_ = size;
  }

  void run(int64_t b, int64_t hv, int64_t first_panel, int64_t panels) {
    const Sequence s = sequence_of(p_, b);
    const int64_t column = first_panel * kPanel;
    const int64_t columns = std::min(panels * kPanel, p_.rec.DV - column);
    for (int64_t t = s.tokens; t < s.room; ++t) {
      clear_row(p_.dtype, columns, p_.out, out_at(s, t, hv, column));
    }
    if (s.tokens == 0) return;
    memory_ = thread_scratch(size_);
    load_state(s, hv, column, columns);
    for (int64_t t = 0; t < s.tokens; t += kChunk) {
      prepare(s, hv, t, std::min(kChunk, s.tokens - t));
      for (int64_t panel = 0; panel < panels; ++panel) {
        run_panel(s, hv, t, panel, column + panel * kPanel);
      }
    }
    store_state(s, hv, column, columns);
  }

 private:
  float* at(int64_t offset) const { return memory_ + offset; }

  int64_t out_at(const Sequence& s, int64_t t, int64_t hv, int64_t column) const {
    return ((s.row * p_.T + s.first + t) * p_.rec.HV + hv) * p_.rec.DV + column;
  }

  int64_t state_at(const Sequence& s, int64_t hv, int64_t column) const {
    return s.slot * p_.state.slot_stride + (hv * p_.rec.DV + column) * DK_;
  }

  // state [columns, DK] -> [panel][DK, kPanel], zero beyond the last column
  void load_state(const Sequence& s, int64_t hv, int64_t column, int64_t columns) {
    for (int64_t c = 0; c < columns; c += kPanel) {
      float* panel = at(state_) + c * DK_;
      const int64_t width = std::min(kPanel, columns - c);
      widen_row(p_.state.dtype, p_.state.data, state_at(s, hv, column + c), width * DK_, at(wide_));
      if (width < kPanel) std::memset(panel, 0, DK_ * kPanel * sizeof(float));
      transpose(width, DK_, at(wide_), DK_, panel, kPanel);
    }
  }

  void store_state(const Sequence& s, int64_t hv, int64_t column, int64_t columns) {
    for (int64_t c = 0; c < columns; c += kPanel) {
      const int64_t width = std::min(kPanel, columns - c);
      transpose(DK_, width, at(state_) + c * DK_, kPanel, at(wide_), DK_);
      narrow_row(p_.state.dtype, at(wide_), width * DK_, p_.state.data, state_at(s, hv, column + c));
    }
  }

  // Everything of the chunk's n tokens that does not depend on the value column.
  void prepare(const Sequence& s, int64_t hv, int64_t t, int64_t n) {
    const int64_t padded = round_up(n, kBlock);
    const int64_t hk = hv / (p_.rec.HV / p_.rec.HK);
    stage_rows(p_, s.row, s.first + t, n, hk, at(k_), at(q_));
    stage_decays(p_, s.row, s.first + t, n, hv, at(decay_));
    stage_betas(p_, s.row, s.first + t, n, hv, at(beta_));
    for (const int64_t rows : {k_, q_}) {
      std::memset(at(rows) + n * DK_, 0, (padded - n) * DK_ * sizeof(float));
    }
    coefficients_.n = n;
    coefficients_.ld = kChunk;
    coefficients_.write = delta_ ? at(write_) : nullptr;
    coefficients_.read = at(read_);
    coefficients_.decays = at(decays_);
    coefficients_.reach = at(reach_);
    if (channel_) {
      prepare_channel(n, padded);
    } else {
      prepare_head(n, padded);
    }
  }

  void prepare_head(int64_t n, int64_t padded) {
    for (int64_t j = 0; j < n; j += kPanel) {
      const int64_t width = std::min(kPanel, padded - j);
      float* panel = at(transposed_) + j * DK_;
      transpose(width, DK_, at(k_) + j * DK_, DK_, panel, kPanel);
      // Rows above the panel's diagonal have nothing to read there.
      const int64_t skip = j * DK_;
      if (delta_) {
        multiply<kPanelVecs, Layout::kRows, Into::kSet>(padded - j, DK_, at(k_) + skip, DK_, panel, kPanel,
                                                        at(gram_k_) + j * kChunk + j, kChunk);
      }
      multiply<kPanelVecs, Layout::kRows, Into::kSet>(padded - j, DK_, at(q_) + skip, DK_, panel, kPanel,
                                                      at(gram_q_) + j * kChunk + j, kChunk);
    }
    const bool gated = p_.rec.gate == Gate::kHead;
    coefficients_of(nullptr, gated ? at(decay_) : nullptr, at(beta_), at(gram_k_), at(gram_q_), kChunk,
                    coefficients_);
    if (!gated) return;
    // The decay from every token to the end of the chunk is the last row of D.
    std::memcpy(at(tail_), at(decays_) + (n - 1) * kChunk, n * sizeof(float));
    at(total_)[0] = at(reach_)[n - 1];
  }

  void prepare_channel(int64_t n, int64_t padded) {
    channel_coefficients(nullptr, at(decay_), at(beta_), at(k_), at(q_), DK_, at(k_reach_), at(q_reach_),
                         coefficients_);
    for (const int64_t rows : {k_reach_, q_reach_}) {
      std::memset(at(rows) + n * DK_, 0, (padded - n) * DK_ * sizeof(float));
    }
    // From the last token back: total is the decay of the tokens after j.
    float* total = at(total_);
    for (int64_t d = 0; d < DK_; ++d) total[d] = 1.0f;
    for (int64_t j = n - 1; j >= 0; --j) {
      for (int64_t d = 0; d < DK_; d += Vec::kWidth) {
        const Vec w = Vec::load(total + d);
        (w * Vec::load(at(k_) + j * DK_ + d)).store(at(k_write_) + j * DK_ + d);
        (w * Vec::load(at(decay_) + j * DK_ + d)).store(total + d);
      }
    }
  }

  // One panel of value columns, `column` its first.
  void run_panel(const Sequence& s, int64_t hv, int64_t t, int64_t panel, int64_t column) {
    const int64_t n = coefficients_.n, padded = round_up(n, kBlock);
    const int64_t columns = std::min(kPanel, p_.rec.DV - column);
    const bool gated = p_.rec.gate == Gate::kHead;
    float* state = at(state_) + panel * DK_ * kPanel;
    float* u = at(u_);
    float* o = at(o_);
    if (delta_) {
      multiply<kPanelVecs, Layout::kRows, Into::kSet>(padded, DK_, at(channel_ ? k_reach_ : k_), DK_, state,
                                                      kPanel, o, kPanel);
    }
    for (int64_t i = 0; i < n; ++i) {
      float row[kPanel] = {};
      widen_row(p_.dtype, p_.v, at_token(p_.v_stride, s.row, s.first + t + i, hv) + column, columns, row);
      const float beta = at(beta_)[i], reach = gated ? at(reach_)[i] : 1.0f;
      for (int64_t c = 0; c < kPanel; c += Vec::kWidth) {
        Vec write = Vec::load(row + c);
        if (delta_) write = Vec::set(beta) * (write - Vec::set(reach) * Vec::load(o + i * kPanel + c));
        write.store(u + i * kPanel + c);
      }
    }
    std::memset(u + n * kPanel, 0, (padded - n) * kPanel * sizeof(float));
    if (delta_) substitute(coefficients_, u);

    multiply<kPanelVecs, Layout::kRows, Into::kSet>(padded, DK_, at(channel_ ? q_reach_ : q_), DK_, state,
                                                    kPanel, o, kPanel);
    if (gated) scale_rows(n, at(reach_), o);
    read_writes(coefficients_, u, o);
    for (int64_t i = 0; i < n; ++i) {
      narrow_row(p_.dtype, o + i * kPanel, columns, p_.out, out_at(s, t + i, hv, column));
    }

    if (gated) scale_rows(n, at(tail_), u);
    const float* k = at(channel_ ? k_write_ : k_);
    if (p_.rec.gate == Gate::kNone) {
      multiply<kPanelVecs, Layout::kColumns, Into::kAdd>(DK_, n, k, DK_, u, kPanel, state, kPanel);
    } else {
      multiply<kPanelVecs, Layout::kColumns, Into::kScaleAdd>(DK_, n, k, DK_, u, kPanel, state, kPanel,
                                                              {at(total_), channel_ ? 1 : 0});
    }
  }

  static void scale_rows(int64_t n, const float* factor, float* x) {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t c = 0; c < kPanel; c += Vec::kWidth) {
        (Vec::set(factor[i]) * Vec::load(x + i * kPanel + c)).store(x + i * kPanel + c);
      }
    }
  }

  const PrefillParams& p_;
  const int64_t DK_, panels_;
  const bool delta_, channel_;
  float* memory_ = nullptr;
  Coefficients coefficients_;
  // Offsets into memory_. [panels, DK, kPanel]:
  int64_t state_;
  // [chunk, DK] rows of the tokens, as staged, scaled by the decay from the chunk's begin, and by that to its
  // end:
  int64_t k_, q_, k_reach_, q_reach_, k_write_, decay_;
  int64_t beta_, reach_, tail_, total_;              // [chunk]; total [DK]
  int64_t transposed_;                               // panels of K^T [DK, chunk]
  int64_t gram_k_, gram_q_, decays_, write_, read_;  // [chunk, chunk]
  int64_t u_, o_;                                    // [chunk, kPanel]
  int64_t wide_;                                     // [kPanel, DK]
  int64_t size_;
};

// Tokens of the packed form that lie outside every sequence.
void clear_uncovered(const PrefillParams& p) {
  if (p.cu_seqlens == nullptr) return;
  const int64_t row = p.rec.HV * p.rec.DV;
  const int64_t begin = clamp_to(p.B > 0 ? p.cu_seqlens[0] : p.T, p.T);
  const int64_t end = clamp_to(p.B > 0 ? p.cu_seqlens[p.B] : p.T, p.T);
  clear_row(p.dtype, begin * row, p.out, 0);
  clear_row(p.dtype, (p.T - end) * row, p.out, end * row);
}

}  // namespace

Status prefill(const PrefillParams& p) {
  const Recurrence& rec = p.rec;
  if (rec.HK <= 0 || rec.HV % rec.HK != 0) return Status::kInvalidArgument;
  if ((rec.gate == Gate::kNone) != (p.g == nullptr)) return Status::kInvalidArgument;
  if ((rec.update == Update::kDelta) != (p.beta != nullptr)) return Status::kInvalidArgument;
  if (p.lengths != nullptr && p.cu_seqlens != nullptr) return Status::kInvalidArgument;
  if (rec.DK % kKeyMultiple != 0 || p.state.dtype == DType::kFloat16) return Status::kUnsupported;
  clear_uncovered(p);
  if (p.B == 0 || rec.DV == 0) return Status::kOk;

  // Whole heads where they feed the threads: the coefficients are then computed once a head.
  const int64_t panels = (rec.DV + kPanel - 1) / kPanel;
  const int64_t wanted = (2 * max_threads() + p.B * rec.HV - 1) / (p.B * rec.HV);
  const int64_t groups = std::min(panels, wanted);
  const int64_t each = (panels + groups - 1) / groups;
  const int64_t parts = (panels + each - 1) / each * rec.HV;
  int64_t tokens = 0;
  for (int64_t b = 0; b < p.B; ++b) tokens += sequence_of(p, b).tokens;
  // Sequences vary fastest: long ones spread over the threads with the heads.
  parallel_for(parts * p.B, tokens * rec.HV * rec.DK * rec.DV, [&](int64_t item) {
    const int64_t part = item / p.B;
    const int64_t first = part / rec.HV * each;
    Prefiller(p, each).run(item % p.B, part % rec.HV, first, std::min(each, panels - first));
  });
  return Status::kOk;
}

}  // namespace specdec::cpu::SPECDEC_ISA
