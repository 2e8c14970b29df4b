// Solve verification: the masked UT transform (ut_transform.h) of a whole tree against a state that is read
// once. Per tile of value rows
//
//   [Q; K] S^T    as S [rows, DK] x [Q; K]^T [DK, 2 n]: the state is the broadcast side as it lies in memory
//   U, O          on panels of value columns, after one transposition
//
// Two multiply-adds per state element and token where a step has four operations. The Gram matrices belong to
// a key head and serve all its value heads; the coefficients belong to a value head and serve all its tiles.
#include "verify_solve.h"

#include <algorithm>

#include "parallel.h"
#include "scratch.h"
#include "specdec/sequences.h"
#include "ut_transform.h"
#include "verify_outputs.h"

namespace specdec::cpu::SPECDEC_ISA {

namespace {

// At DK = 256 64 KB of state, in the second cache while the panels pass over it.
constexpr int64_t kTileRows = 64;
static_assert(kTileRows % kPanel == 0);

class Solver {
 public:
  explicit Solver(const VerifyParams& p)
      : p_(p),
        DK_(p.rec.DK),
        decays_(decay_size(p.rec)),
        tiles_((p.rec.DV + kTileRows - 1) / kTileRows),
        delta_(p.rec.update == Update::kDelta),
        channel_(p.rec.gate == Gate::kChannel) {
    const int64_t nodes = round_up(p.N, kBlock);
    // Of [Q; K], and a register block of zeros.
    const int64_t columns = round_up(2 * p.N, Vec::kWidth) + kBlock;
    ld_ = round_up(p.N, Vec::kWidth);
    gram_ld_ = round_up(p.N, kPanel) + kPanel;
    int64_t size = 0;
    const auto place = [&size](int64_t count) {
      const int64_t offset = size;
      size += round_up(count, 16);  // a cache line
      return offset;
    };
    rows_ = place(columns * DK_);
    reach_rows_ = place(channel_ ? columns * DK_ : 0);
    panels_ = place(columns * DK_);
    gram_ = place(channel_ ? 0 : columns * gram_ld_);
    decay_ = place(p.N * decays_);
    beta_ = place(p.N);
    reach_ = place(p.N);
    products_ = place(channel_ ? 0 : p.N * ld_);
    write_ = place(nodes * ld_);
    read_ = place(nodes * ld_);
    answers_ = place(columns * kTileRows);
    turned_ = place(columns * kPanel);
    u_ = place(nodes * kPanel);
    wide_ = place(p.state.dtype == DType::kFloat32 ? 0 : kTileRows * DK_);
    most_pending_ = p.has_pending ? std::min(p.pending_path.max_length, p.pending.nodes) : 0;
    pending_decay_ = place(most_pending_ * decays_);
    pending_ = place(most_pending_ * static_cast<int64_t>(sizeof(Factor) / sizeof(float)));
    size_ = size;
  }

  int64_t items() const { return p_.B * p_.rec.HV * tiles_; }

  int64_t work() const { return p_.B * p_.rec.HV * p_.rec.DV * DK_ * (2 * p_.N + most_pending_); }

  // Items are (row, value head, tile), the tile fastest: what a head shares is prepared once a range.
  void run(int64_t begin, int64_t end) {
    memory_ = thread_scratch(size_);
    int64_t staged_b = -1, staged_hk = -1, staged_hv = -1;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t b = item / (p_.rec.HV * tiles_);
      const int64_t hv = item / tiles_ % p_.rec.HV;
      const int64_t hk = hv / (p_.rec.HV / p_.rec.HK);
      const int64_t tile = item % tiles_;
      if (b != staged_b) {
        b_ = b;
        slot_ = slot_of(p_.slots, b);
        n_ = slot_ < 0 ? 0 : valid_length(p_.lengths, b, p_.N);
        pending_count_ = p_.has_pending && slot_ >= 0 ? path_length(p_.pending_path, b, p_.pending.nodes) : 0;
        all_columns_ = round_up(2 * n_, Vec::kWidth);
        columns_ = delta_ ? all_columns_ : std::min(all_columns_, round_up(n_, kPanel));
        staged_hk = staged_hv = -1;
      }
      if (hk != staged_hk) stage_key_head(hk);
      if (hv != staged_hv) stage_value_head(hv);
      staged_b = b;
      staged_hk = hk;
      staged_hv = hv;
      const int64_t row = tile * kTileRows;
      const int64_t rows = std::min(kTileRows, p_.rec.DV - row);
      if (slot_ >= 0 && (n_ > 0 || pending_count_ > 0)) run_tile(hv, row, rows);
      if (tile == 0) write_head_factors(p_, b_, n_, hv, keys(rows_));
      clear_padding(p_, b_, n_, hv, row, rows);
    }
  }

 private:
  float* at(int64_t offset) const { return memory_ + offset; }
  // Rows [Q; K]: queries first, so that the additive rule, which asks no key, takes the first panels alone.
  float* queries(int64_t rows) const { return at(rows); }
  float* keys(int64_t rows) const { return at(rows) + n_ * DK_; }
  const int32_t* parents() const { return p_.parents != nullptr ? p_.parents + b_ * p_.N : nullptr; }
  int64_t out_at(int64_t n, int64_t hv, int64_t row) const {
    return ((b_ * p_.N + n) * p_.rec.HV + hv) * p_.rec.DV + row;
  }

  // Queries, keys and, without a gate per channel, what only they decide: the panels and Gram matrices.
  void stage_key_head(int64_t hk) {
    if (n_ == 0) return;
    stage_rows(p_, b_, 0, n_, hk, keys(rows_), queries(rows_));
    std::memset(at(rows_) + 2 * n_ * DK_, 0, (all_columns_ + kBlock - 2 * n_) * DK_ * sizeof(float));
    if (channel_) return;
    make_panels(rows_);
    // Columns n to 2 n of [Q; K] [Q; K]^T, up to the diagonal.
    const int64_t first = n_ / kPanel * kPanel;
    for (int64_t c = first; c < 2 * n_; c += kPanel) {
      multiply_gram(std::max<int64_t>(0, c - n_), n_, c, first);
      if (delta_) multiply_gram(std::max(n_, c), 2 * n_, c, first);
    }
  }

  // gram [begin to end, rounded up to a register block; c - first] with the panel at column c.
  void multiply_gram(int64_t begin, int64_t end, int64_t c, int64_t first) {
    if (begin >= end) return;
    multiply_panel(round_up(end - begin, kBlock), at(rows_) + begin * DK_, c,
                   at(gram_) + begin * gram_ld_ + c - first, gram_ld_);
  }

  // rows^T, panel by panel; the last one may be a single vector wide.
  void make_panels(int64_t rows) {
    for (int64_t c = 0; c < all_columns_; c += kPanel) {
      const int64_t width = std::min(kPanel, all_columns_ - c);
      transpose(width, DK_, at(rows) + c * DK_, DK_, at(panels_) + c * DK_, width);
    }
  }

  // c [M, width of the panel] = a [M, DK] times the panel at `column`.
  void multiply_panel(int64_t M, const float* a, int64_t column, float* c, int64_t ldc) {
    const float* panel = at(panels_) + column * DK_;
    if (all_columns_ - column >= kPanel) {
      multiply<kPanelVecs, Layout::kRows, Into::kSet>(M, DK_, a, DK_, panel, kPanel, c, ldc);
    } else {
      multiply<1, Layout::kRows, Into::kSet>(M, DK_, a, DK_, panel, Vec::kWidth, c, ldc);
    }
  }

  // Decays and the coefficients, and with a gate per channel the panels.
  void stage_value_head(int64_t hv) {
    for (int64_t i = 0; i < pending_count_; ++i) {
      pending()[i] = stored_factor(p_.rec, p_.pending, b_, path_node(p_.pending_path, b_, i), hv,
                                   at(pending_decay_) + i * decays_);
    }
    if (n_ == 0) return;
    stage_decays(p_, b_, 0, n_, hv, at(decay_));
    stage_betas(p_, b_, 0, n_, hv, at(beta_));
    coefficients_.n = n_;
    coefficients_.ld = ld_;
    coefficients_.write = delta_ ? at(write_) : nullptr;
    coefficients_.read = at(read_);
    coefficients_.decays = at(products_);
    coefficients_.reach = at(reach_);
    if (channel_) {
      channel_coefficients(parents(), at(decay_), at(beta_), keys(rows_), queries(rows_), DK_,
                           keys(reach_rows_), queries(reach_rows_), coefficients_);
      std::memset(at(reach_rows_) + 2 * n_ * DK_, 0, (all_columns_ - 2 * n_) * DK_ * sizeof(float));
      make_panels(reach_rows_);
    } else {
      const float* qk = at(gram_) + n_ - n_ / kPanel * kPanel;
      coefficients_of(parents(), gated() ? at(decay_) : nullptr, at(beta_), qk + n_ * gram_ld_, qk, gram_ld_,
                      coefficients_);
    }
  }

  bool gated() const { return p_.rec.gate == Gate::kHead; }
  Factor* pending() const { return reinterpret_cast<Factor*>(at(pending_)); }

  // Value rows [row, row + rows) of one head.
  void run_tile(int64_t hv, int64_t row, int64_t rows) {
    const float* state = advance_state(hv, row, rows);
    if (n_ == 0) return;
    // answers: [panel][rows, width], S [Q; K]^T
    for (int64_t c = 0; c < columns_; c += kPanel) {
      if (p_.state.dtype == DType::kFloat32 && columns_ - c >= kPanel && rows % kBlock == 0) {
        multiply_state(state, rows, c);
      } else {
        multiply_panel(rows, state, c, at(answers_) + c * rows, std::min(kPanel, columns_ - c));
      }
    }
    for (int64_t r = 0; r < rows; r += kPanel) {
      solve_panel(hv, row + r, std::min(kPanel, rows - r), r, rows);
    }
  }

  // The panel at column c of the answers, while the tile behind this one is fetched: a tile is read from
  // memory by its first panel, which would wait for every row. Every panel fetches its share.
  void multiply_state(const float* state, int64_t rows, int64_t c) {
    const int64_t panels = columns_ / kPanel,
                  share = rows * DK_ * static_cast<int64_t>(sizeof(float)) / panels;
    const char* next = reinterpret_cast<const char*>(state + rows * DK_) + c / kPanel * share;
    const int64_t bytes = kBlock * static_cast<int64_t>(sizeof(float)) / panels;
    for (int64_t m = 0; m < rows; m += kBlock) {
      multiply_block<kBlock, kPanelVecs, Layout::kRows, Into::kSet, true>(
          DK_, state + m * DK_, DK_, at(panels_) + c * DK_, kPanel, at(answers_) + c * rows + m * kPanel,
          kPanel, {}, {next + m * DK_ * static_cast<int64_t>(sizeof(float)) / panels, bytes});
    }
  }

  // Pending factors go into the durable rows with the operations of the step. Returns the rows in float32.
  const float* advance_state(int64_t hv, int64_t row, int64_t rows) {
    const int64_t offset = slot_ * p_.state.slot_stride + (hv * p_.rec.DV + row) * DK_;
    if (pending_count_ > 0) {
      visit_gate(p_.rec.gate, [&](auto gate) {
        if (p_.state.dtype == DType::kBFloat16) {
          fold_pass<decltype(gate)::value>(static_cast<bf16*>(p_.state.data) + offset, DK_, row, rows,
                                           pending(), pending_count_);
        } else {
          fold_pass<decltype(gate)::value>(static_cast<float*>(p_.state.data) + offset, DK_, row, rows,
                                           pending(), pending_count_);
        }
      });
    }
    if (p_.state.dtype == DType::kFloat32) return static_cast<const float*>(p_.state.data) + offset;
    if (n_ > 0) widen_row(p_.state.dtype, p_.state.data, offset, rows * DK_, at(wide_));
    return at(wide_);
  }

  // `width` value columns from `column` of the head; they are rows r, r + 1, ... of a tile of `rows`.
  void solve_panel(int64_t hv, int64_t column, int64_t width, int64_t r, int64_t rows) {
    float* u = at(u_);
    float* o = at(turned_);
    begin_panel(hv, column, width, r, rows);
    if (delta_) substitute(coefficients_, u);
    read_writes(coefficients_, u, o);
    if (parents() != nullptr && !all_finite(o, n_)) {
      begin_panel(hv, column, width, r, rows);
      solve_paths(parents(), coefficients_, u, o);
    }
    for (int64_t i = 0; i < n_; ++i) {
      std::memcpy(p_.u_out + out_at(i, hv, column), u + i * kPanel, width * sizeof(float));
      narrow_row(p_.dtype, o + i * kPanel, width, p_.out, out_at(i, hv, column));
    }
  }

  // What the tokens write and read if the state before them is all there is: u [nodes, kPanel], and e^G Q S0
  // in the first rows of turned.
  void begin_panel(int64_t hv, int64_t column, int64_t width, int64_t r, int64_t rows) {
    // turned [columns, kPanel]: Q S0, then K S0
    float* turned = at(turned_);
    if (width < kPanel) std::memset(turned, 0, columns_ * kPanel * sizeof(float));
    for (int64_t c = 0; c < columns_; c += kPanel) {
      const int64_t answers = std::min(kPanel, columns_ - c);
      transpose(width, answers, at(answers_) + c * rows + r * answers, answers, turned + c * kPanel, kPanel);
    }
    float* u = at(u_);
    for (int64_t i = 0; i < n_; ++i) {
      float value[kPanel] = {};
      widen_row(p_.dtype, p_.v, at_token(p_.v_stride, b_, i, hv) + column, width, value);
      const Vec reach = Vec::set(gated() ? at(reach_)[i] : 1.0f);
      float* answer = turned + i * kPanel;
      const float* read = turned + (n_ + i) * kPanel;
      for (int64_t c = 0; c < kPanel; c += Vec::kWidth) {
        Vec write = Vec::load(value + c);
        if (delta_) write = Vec::set(at(beta_)[i]) * (write - reach * Vec::load(read + c));
        write.store(u + i * kPanel + c);
        (reach * Vec::load(answer + c)).store(answer + c);
      }
    }
    std::memset(u + n_ * kPanel, 0, (round_up(n_, kBlock) - n_) * kPanel * sizeof(float));
  }

  const VerifyParams& p_;
  const int64_t DK_, decays_, tiles_;
  const bool delta_, channel_;
  int64_t ld_, gram_ld_, most_pending_;
  float* memory_ = nullptr;
  // The sequence in hand. [Q; K]^T has all_columns_ in whole vectors; the state is asked for columns_ of
  // them.
  int64_t b_ = 0, slot_ = 0, n_ = 0, pending_count_ = 0, all_columns_ = 0, columns_ = 0;
  Coefficients coefficients_;
  // Offsets into memory_. [2 N, DK] rows [Q; K], the same times e^G per channel, and their panels:
  int64_t rows_, reach_rows_, panels_;
  int64_t gram_;                     // [2 N, N]: q_i . k_j above k_i . k_j
  int64_t decay_, beta_, reach_;     // [N, decay_size], [N], [N]
  int64_t products_, write_, read_;  // [N, N]
  int64_t answers_, turned_, u_;     // [2 N, kTileRows], [2 N, kPanel], [N, kPanel]
  int64_t wide_;                     // [kTileRows, DK] of a bfloat16 state
  int64_t pending_decay_, pending_;  // [P, decay_size], Factor [P]
  int64_t size_;
};

}  // namespace

Status verify_solve(const VerifyParams& p) {
  if (p.has_prefix || p.N > kMaxSolveNodes || p.rec.DK % kKeyMultiple != 0) return Status::kUnsupported;
  if (p.state.dtype == DType::kFloat16) return Status::kUnsupported;
  if (p.B == 0 || p.rec.DV == 0) return Status::kOk;
  const Solver shape(p);
  parallel_ranges(shape.items(), shape.work(), [&](int64_t begin, int64_t end) {
    Solver solver = shape;  // a thread's own
    solver.run(begin, end);
  });
  return Status::kOk;
}

}  // namespace specdec::cpu::SPECDEC_ISA
