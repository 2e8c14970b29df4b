// Prefill: a sequence runs through chunks of the same solve (solve_chunk.cuh) while its state stays on chip.
// A block owns (sequence, value head, tile of value rows), reads its tile of the state once and writes it
// once.
//
// At the end of a chunk S <- e^G S + sum_j D_j u_j k_j^T, D_j the decay from token j to the chunk's end. A
// warp adds to the value rows that it asks and writes, so that only the staging of tokens and the
// coefficients need the block's barriers.
#pragma once

#include "device_values.cuh"
#include "solve_chunk.cuh"

namespace specdec::cuda {

template <typename Traits>
class Prefill {
 public:
  using Params = PrefillParams;
  using Chunk = SolveChunk<Traits>;
  using Sums = typename Chunk::Sums;
  static constexpr int kThreads = Chunk::kThreads, kWarps = Chunk::kWarps;
  static constexpr int kRows = Traits::kRows, kBlocks = Chunk::kBlocks;

  static Launch shape(const Params& p) {
    if (p.T == 0 && p.B == 0) return {{0, 1, 1}, 0};
    // Packed tokens that no sequence covers are cleared even where there is no sequence.
    const int64_t rows = p.B > 0 || p.cu_seqlens == nullptr ? p.B : 1;
    return {{static_cast<int32_t>(rows * p.rec.HV * (p.rec.DV / kStateRows)), 1, 1},
            Chunk::shared_bytes(size(p))};
  }

  SPECDEC_DEVICE static void run(const Params& p, SharedArena shared) { Prefill(p, shared).run(); }

 private:
  SPECDEC_HOST_DEVICE static SolveSize size(const Params& p) {
    return {static_cast<int>(p.rec.DK), kRows, false, false, false};
  }

  SPECDEC_DEVICE Prefill(const Params& params, SharedArena& arena)
      : p_(params),
        q_(p_.q, p_.dtype),
        k_(p_.k, p_.dtype),
        v_(p_.v, p_.dtype),
        g_(p_.g, DType::kFloat32),
        beta_(p_.beta),
        out_(p_.out, p_.dtype),
        chunk_(p_.rec, size(p_), arena),
        state_(p_.state, chunk_.DK, chunk_.state) {
    const int tiles = static_cast<int>(p_.rec.DV / kStateRows), heads = static_cast<int>(p_.rec.HV);
    tile_ = block().x % tiles;
    hv_ = block().x / tiles % heads;
    b_ = block().x / tiles / heads;
    hk_ = hv_ / static_cast<int>(p_.rec.HV / p_.rec.HK);
  }

  SPECDEC_DEVICE int64_t limited(int64_t x, int64_t most) const { return x < 0 ? 0 : x > most ? most : x; }

  // Where the sequence lies: row_, first_, tokens_; clears what of `out` is nobody's or padding.
  SPECDEC_DEVICE void find_sequence() {
    const int64_t slot = p_.B == 0 ? -1 : slot_of(p_.slots, b_, p_.state.slots);
    int64_t room = p_.T;
    tokens_ = p_.T;
    row_ = b_;
    first_ = 0;
    if (p_.cu_seqlens != nullptr) {
      const Global<const int32_t> offsets(p_.cu_seqlens);
      row_ = 0;
      if (b_ == 0) clear(0, p_.B > 0 ? limited(offsets.load(0), p_.T) : p_.T);
      if (p_.B == 0) return;
      if (b_ == p_.B - 1) clear(limited(offsets.load(p_.B), p_.T), p_.T);
      first_ = limited(offsets.load(b_), p_.T);
      room = tokens_ = limited(offsets.load(b_ + 1) - first_, p_.T - first_);
    } else if (p_.lengths != nullptr) {
      tokens_ = limited(Global<const int32_t>(p_.lengths).load(b_), p_.T);
    }
    if (slot < 0) tokens_ = 0;
    clear(first_ + tokens_, first_ + room);
    state_at_ = slot * p_.state.slot_stride + (hv_ * p_.rec.DV + tile_ * kStateRows) * chunk_.DK;
  }

  SPECDEC_DEVICE int64_t value_at(int64_t token) const {
    return ((row_ * p_.T + token) * p_.rec.HV + hv_) * p_.rec.DV + tile_ * kStateRows;
  }

  SPECDEC_DEVICE void clear(int64_t begin, int64_t end) const {
    for (int64_t t = begin + warp(); t < end; t += kWarps) {
      if (lane() < kStateRows / 2) out_.store2(value_at(t) + 2 * lane(), 0.0f, 0.0f);
    }
  }

  SPECDEC_DEVICE void run() {
    find_sequence();
    if (p_.B == 0 || tokens_ == 0) return;
    state_.begin(state_at_);
    copy_async_commit();
    state_.finish(state_at_);
    for (int64_t t = 0; t < tokens_; t += kRows) {
      const int count = tokens_ - t < kRows ? static_cast<int>(tokens_ - t) : kRows;
      barrier();
      prepare(first_ + t, count);
      solve(first_ + t, count);
    }
    barrier();
    state_.store(state_at_);
  }

  // The coefficients of the `count` tokens from `token` on.
  SPECDEC_DEVICE void prepare(int64_t token, int count) const {
    stage(k_, p_.k_stride, token, hk_, count, chunk_.keys);
    stage(q_, p_.q_stride, token, hk_, count, chunk_.queries);
    if constexpr (Traits::kChannel) stage(g_, p_.g_stride, token, hv_, count, chunk_.decays);
    copy_async_commit();
    const int i = thread();
    if (i < kRows) {
      float decay = 1.0f, strength = 0.0f;
      if (i < count && p_.rec.gate == Gate::kHead)
        decay = exp(g_.load(at_token(p_.g_stride, row_, token + i, hv_)));
      if (i < count && chunk_.delta) strength = beta_.load(at_token(p_.beta_stride, row_, token + i, hv_));
      chunk_.stage_node(i, i < count ? i - 1 : -1, decay, strength);
    }
    copy_async_wait<0>();
    barrier();
    chunk_.finish_tokens(count, p_.qk_l2norm, p_.scale, [](int, const Pack<float, 4>(&)[kQuads]) {});
    if constexpr (Traits::kChannel) chunk_.finish_decays(0, count);
    barrier();
    chunk_.mark_bad(0);
    chunk_.begin_walks(0, count);
    if constexpr (Traits::kChannel) {
      barrier();
      chunk_.walk_channels(0, 0, chunk_.write, chunk_.read, chunk_.ancestors);
    } else {
      chunk_.gram(chunk_.keys, true, chunk_.write, chunk_.read);
      barrier();
      chunk_.walk(0, 0, count - 1, chunk_.write, chunk_.read, chunk_.write, chunk_.read, chunk_.ancestors);
    }
    barrier();
    chunk_.invert();
    barrier();
  }

  SPECDEC_DEVICE void stage(const Elements& from, const Strides& stride, int64_t token, int head, int count,
                            const Shared<float>& to) const {
    stage_rows<kWarps>(from, stride, row_, token, head, count, kRows, chunk_.DK, to, chunk_.ld);
  }

  SPECDEC_DEVICE void solve(int64_t token, int count) const {
    Sums values, writes = {}, answers = {}, from_keys, from_queries;
    uint32_t poison = 0;
    Chunk::load_values(v_, p_.v_stride, row_, token, hv_, tile_ * kStateRows, count, values);
    chunk_.ask(count, from_keys, from_queries);
    chunk_.right_sides(0, values, from_keys, from_queries, writes, answers);
    chunk_.substitute(count, 0, writes, answers, poison);
    Chunk::set_nan(poison, answers);
    Chunk::set_nan(poison, writes);  // of the additive rule, too: they go into the state
    SPECDEC_UNROLL
    for (int m = 0; m < kBlocks; ++m) {
      SPECDEC_UNROLL
      for (int r = 0; r < 4; r += 2) {
        const int i = m * 16 + sum_row(r);
        if (i >= count) continue;
        out_.store2(value_at(token + i) + Chunk::column() + sum_column(r), answers.x[m][r],
                    answers.x[m][r + 1]);
      }
    }
    chunk_.advance_state(count, writes);
  }

  const Params& p_;
  const Elements q_, k_, v_, g_;
  const Global<const float> beta_;
  const OutElements out_;
  const Chunk chunk_;
  const StateRows<kWarps> state_;
  int b_, hv_, hk_, tile_;
  int64_t row_, first_, tokens_, state_at_ = 0;
};

}  // namespace specdec::cuda
