// Verification of a chain or a tree by the masked UT transform (solve_chunk.cuh): one launch, the state is
// read once, and nothing but outputs and factors is written.
//
// A block serves one key head of one sequence and walks over (value head, tile of value rows), the tile
// fastest. Up to a chunk of tokens the Gram matrices are computed once for all its value heads, the
// coefficients once for all tiles of a head. More tokens are solved chunk by chunk, each against all chunks
// before it, whose keys are staged again and whose writes are read back from u_out: their coefficients would
// not fit. Key heads are split over several blocks only where the GPU would be idle otherwise; a split
// changes no number.
#pragma once

#include "device_values.cuh"
#include "solve_chunk.cuh"

namespace specdec::cuda {

template <typename Traits>
class VerifySolve {
 public:
  using Params = VerifyParams;
  using Chunk = SolveChunk<Traits>;
  using Sums = typename Chunk::Sums;
  static constexpr int kThreads = Chunk::kThreads, kWarps = Chunk::kWarps;
  static constexpr int kRows = Traits::kRows, kBlocks = Chunk::kBlocks;

  static Launch shape(const Params& p) {
    if (p.B == 0 || p.rec.HV == 0 || p.rec.DV == 0 || (p.N == 0 && !p.has_pending)) return {{0, 1, 1}, 0};
    const Split split(p);
    return {{static_cast<int32_t>(p.B * p.rec.HK * split.parts), 1, 1}, Chunk::shared_bytes(split.size(p))};
  }

  SPECDEC_DEVICE static void run(const Params& p, SharedArena shared) { VerifySolve(p, shared).run(); }

 private:
  // How the (value head, tile) of a key head are dealt to blocks.
  struct Split {
    static constexpr int64_t kEnough = 264;  // blocks: two for each multiprocessor of a large GPU

    SPECDEC_HOST_DEVICE explicit Split(const Params& p) {
      tiles = static_cast<int>(p.rec.DV / kStateRows);
      group = static_cast<int>(p.rec.HV / p.rec.HK);
      const int units = tiles * group;
      // To the nearest: a part more reads the tokens of its key head again.
      const int64_t heads = p.B * p.rec.HK, nearest = (kEnough + heads / 2) / heads;
      const int64_t wanted = nearest > 1 ? nearest : 1;
      const int most = wanted < units ? static_cast<int>(wanted) : units;
      each = (units + most - 1) / most;
      parts = (units + each - 1) / each;
    }
    SPECDEC_HOST_DEVICE SolveSize size(const Params& p) const {
      const int chunks = static_cast<int>((p.N + kRows - 1) / kRows);
      // A block that begins and ends with a head has but one, or another block has the head's other tiles.
      const bool heads = group > 1 && tiles % each != 0;
      return {static_cast<int>(p.rec.DK), (chunks > 0 ? chunks : 1) * kRows, heads && chunks == 1, chunks > 1,
              p.has_pending};
    }
    int tiles, group, each, parts;
  };

  SPECDEC_DEVICE VerifySolve(const Params& params, SharedArena& arena)
      : p_(params),
        split_(params),
        q_(p_.q, p_.dtype),
        k_(p_.k, p_.dtype),
        v_(p_.v, p_.dtype),
        g_(p_.g, DType::kFloat32),
        beta_(p_.beta),
        parents_(p_.parents),
        out_(p_.out, p_.dtype),
        u_out_(p_.u_out),
        chunk_(p_.rec, split_.size(p_), arena),
        state_(p_.state, chunk_.DK, chunk_.state) {
    const int heads = static_cast<int>(p_.rec.HK), head = block().x / split_.parts;
    part_ = block().x % split_.parts;
    b_ = head / heads;
    hk_ = head % heads;
    slot_ = slot_of(p_.slots, b_, p_.state.slots);
    n_ = slot_ < 0 ? 0 : length_of(p_.lengths, b_, p_.N);
    pending_ = slot_ < 0 || !p_.has_pending ? 0 : path_length(p_.pending_path, b_, p_.pending.nodes);
  }

  SPECDEC_DEVICE void run() {
    const int begin = part_ * split_.each, all = split_.tiles * split_.group;
    const int end = begin + split_.each < all ? begin + split_.each : all;
    const bool one_chunk = n_ <= kRows;
    wanted_ = n_ > 0 || pending_ > 0 ? state_at(begin) : -1;
    if (part_ == 0) clear_keys();
    for (int unit = begin; unit < end; ++unit) {
      hv_ = hk_ * split_.group + unit / split_.tiles;
      tile_ = unit % split_.tiles;
      const bool first_unit = unit == begin, new_head = first_unit || tile_ == 0;
      if (tile_ == 0) write_gates();
      clear_padding();
      if (n_ == 0 && pending_ == 0) continue;
      if (n_ > 0 && new_head) {
        barrier();
        stage_head();
      }
      const int64_t next = unit + 1 < end ? state_at(unit + 1) : -1;
      int first = 0;
      do {
        // One chunk serves all tiles of a head; queries that walks have turned are staged again.
        if (n_ > 0 && (new_head || !one_chunk))
          prepare(first, first_unit || Traits::kChannel || !one_chunk, first_unit);
        if (first == 0) {
          begin_state();
          state_.finish(state_at(unit));
          if (pending_ > 0) fold_pending(new_head, first_unit, state_at(unit));
          barrier();
        }
        if (n_ > 0) solve(first, first + kRows < n_ ? -1 : next);
        first += kRows;
      } while (first < n_);
      if (n_ == 0) wanted_ = next;
    }
  }

  // --- the state ---

  SPECDEC_DEVICE int64_t state_at(int unit) const {
    const int64_t row =
        (hk_ * split_.group + unit / split_.tiles) * p_.rec.DV + unit % split_.tiles * kStateRows;
    return slot_ * p_.state.slot_stride + row * chunk_.DK;
  }

  // Starts to read the tile that is wanted, once; no warp may still use the one before.
  SPECDEC_DEVICE void begin_state() {
    if (wanted_ >= 0) state_.begin(wanted_);
    copy_async_commit();
    wanted_ = -1;
  }

  // The pending factors into the tile, in the order of the path, and the tile back to memory.
  SPECDEC_DEVICE void fold_pending(bool new_head, bool first_unit, int64_t state) {
    const Global<const float> k(p_.pending.k), u(p_.pending.u), g(p_.pending.g);
    const Global<const int32_t> path(p_.pending_path.path);
    const int DK = chunk_.DK;
    const auto node = [&](int i) {
      const int64_t at =
          path ? path_node(path.load(b_ * p_.pending_path.max_length + i), p_.pending.nodes) : i;
      return b_ * p_.pending.nodes + at;
    };
    for (int begin = 0; begin < pending_; begin += kPendingRows) {
      const int count = pending_ - begin < kPendingRows ? pending_ - begin : kPendingRows;
      const bool again = pending_ > kPendingRows;
      barrier();
      for (int j = warp(); j < count; j += kWarps) {
        const int64_t token = node(begin + j);
        for (int c = 4 * lane(); c < DK && (first_unit || again); c += 128) {
          copy_async<4>(chunk_.pending_keys, j * DK + c, k, (token * p_.rec.HK + hk_) * DK + c);
        }
        if (lane() < kStateRows / 4) {
          copy_async<4>(chunk_.pending_writes, j * kStateRows + 4 * lane(), u,
                        (token * p_.rec.HV + hv_) * p_.rec.DV + tile_ * kStateRows + 4 * lane());
        }
        const int decays = p_.rec.gate == Gate::kNone ? 0 : Traits::kChannel ? DK : 1;
        for (int c = lane(); c < decays && (new_head || again); c += 32) {
          chunk_.pending_decays.store(j * decays + c, exp(g.load((token * p_.rec.HV + hv_) * decays + c)));
        }
      }
      copy_async_commit();
      copy_async_wait<0>();
      barrier();
      state_.fold(chunk_.pending_keys, chunk_.pending_writes, chunk_.pending_decays, p_.rec.gate, count);
    }
    state_.store(state);
  }

  // --- tokens ---

  // What a value head has for every node: parent, decay, strength.
  SPECDEC_DEVICE void stage_head() {
    const int nodes = (n_ + kRows - 1) / kRows * kRows;
    for (int i = thread(); i < nodes; i += kThreads) {
      const bool valid = i < n_;
      const int parent = !valid ? -1 : parents_ ? parent_of(parents_.load(b_ * p_.N + i), i) : i - 1;
      float decay = 1.0f, strength = 0.0f;
      if (valid && p_.rec.gate == Gate::kHead) decay = exp(g_.load(at_token(p_.g_stride, b_, i, hv_)));
      if (valid && chunk_.delta) strength = beta_.load(at_token(p_.beta_stride, b_, i, hv_));
      chunk_.stage_node(i, parent, decay, strength);
    }
  }

  // The coefficients of the chunk at `first`; its tokens are staged first where they are new.
  SPECDEC_DEVICE void prepare(int first, bool new_tokens, bool first_unit) {
    const int count = n_ - first < kRows ? n_ - first : kRows;
    const bool write_keys = first_unit && part_ == 0;
    barrier();
    if (new_tokens) {
      stage(k_, p_.k_stride, first, hk_, count, chunk_.keys);
      stage(q_, p_.q_stride, first, hk_, count, chunk_.queries);
      if constexpr (Traits::kChannel) stage(g_, p_.g_stride, first, hv_, count, chunk_.decays);
      copy_async_commit();
      begin_state();
      copy_async_wait<1>();  // all but the state
      warp_barrier();
      const Global<float> k_out(p_.k_out);
      chunk_.finish_tokens(count, p_.qk_l2norm, p_.scale, [&](int r, const Pack<float, 4>(&x)[kQuads]) {
        if (!write_keys) return;
        const int64_t at = ((b_ * p_.N + first + r) * p_.rec.HK + hk_) * chunk_.DK;
        for (int q = 0; q < kQuads; ++q) {
          const int c = 4 * lane() + 128 * q;
          if (c < chunk_.DK) k_out.store_vec<4>(at + c, x[q]);
        }
      });
      if constexpr (Traits::kChannel) chunk_.finish_decays(first, count);
      barrier();
    }
    chunk_.mark_bad(first);
    chunk_.begin_walks(first, count);
    if constexpr (Traits::kChannel) {
      barrier();
      chunk_.walk_channels(first, first, chunk_.write, chunk_.read, chunk_.ancestors);
    } else {
      if (new_tokens) chunk_.gram(chunk_.keys, true, chunk_.gram_keys, chunk_.gram_queries);
      barrier();
      chunk_.walk(first, first, -1, chunk_.gram_keys, chunk_.gram_queries, chunk_.write, chunk_.read,
                  chunk_.ancestors);
    }
    barrier();
    chunk_.invert();
    barrier();
  }

  SPECDEC_DEVICE void stage(const Elements& from, const Strides& stride, int first, int head, int count,
                            const Shared<float>& to) const {
    stage_rows<kWarps>(from, stride, b_, first, head, count, kRows, chunk_.DK, to, chunk_.ld);
  }

  // What the chunk at `other` gives to the sums of the chunk at `first`.
  SPECDEC_DEVICE void add_earlier(int first, int other, Sums& writes, Sums& reads, uint32_t& poison) {
    const int count = n_ - first < kRows ? n_ - first : kRows;
    barrier();
    stage(k_, p_.k_stride, other, hk_, kRows, chunk_.earlier_keys);
    if constexpr (Traits::kChannel) stage(g_, p_.g_stride, other, hv_, kRows, chunk_.decays);
    copy_async_commit();
    copy_async_wait<0>();
    warp_barrier();
    for (int r = warp(); r < kRows; r += kWarps) {
      chunk_.finish_key(chunk_.earlier_keys, r, kRows, p_.qk_l2norm,
                        [](int, const Pack<float, 4>(&)[kQuads]) {});
    }
    if constexpr (Traits::kChannel) chunk_.finish_decays(other, kRows);
    for (int r = lane() / 2; r < kRows; r += 16) {
      const int c = Chunk::column() + lane() % 2 * 4;
      chunk_.earlier_u.template store_vec<4>(r * Chunk::kWriteLd + c,
                                             u_out_.template load_vec<4>(value_at(other + r) + c));
    }
    barrier();
    if constexpr (Traits::kChannel) {
      chunk_.walk_channels(first, other, chunk_.earlier_write, chunk_.earlier_read, chunk_.earlier_ancestors);
    } else {
      chunk_.gram(chunk_.earlier_keys, false, chunk_.earlier_write, chunk_.earlier_read);
      barrier();
      chunk_.walk(first, other, -1, chunk_.earlier_write, chunk_.earlier_read, chunk_.earlier_write,
                  chunk_.earlier_read, chunk_.earlier_ancestors);
    }
    barrier();
    chunk_.add_earlier(count, other / kRows, writes, reads, poison);
  }

  // --- answers ---

  SPECDEC_DEVICE int64_t value_at(int node) const {
    return ((b_ * p_.N + node) * p_.rec.HV + hv_) * p_.rec.DV + tile_ * kStateRows;
  }

  // Writes and answers of the chunk at `first`; reads the tile `next` as soon as this one is not needed any
  // more.
  SPECDEC_DEVICE void solve(int first, int64_t next) {
    const int count = n_ - first < kRows ? n_ - first : kRows;
    Sums values, writes = {}, answers = {};
    uint32_t poison = 0;
    Chunk::load_values(v_, p_.v_stride, b_, first, hv_, tile_ * kStateRows, count, values);
    for (int other = first - kRows; other >= 0; other -= kRows)
      add_earlier(first, other, writes, answers, poison);
    Sums from_keys, from_queries;
    chunk_.ask(count, from_keys, from_queries);
    barrier();
    wanted_ = next;
    begin_state();
    chunk_.right_sides(first, values, from_keys, from_queries, writes, answers);
    chunk_.substitute(count, first / kRows, writes, answers, poison);
    Chunk::set_nan(poison, answers);
    // The additive rule writes what it is given, whatever the ancestors are.
    if (chunk_.delta) Chunk::set_nan(poison, writes);
    SPECDEC_UNROLL
    for (int m = 0; m < kBlocks; ++m) {
      SPECDEC_UNROLL
      for (int r = 0; r < 4; r += 2) {
        const int i = m * 16 + sum_row(r);
        if (i >= count) continue;
        const int64_t at = value_at(first + i) + Chunk::column() + sum_column(r);
        out_.store2(at, answers.x[m][r], answers.x[m][r + 1]);
        u_out_.template store_vec<2>(at, {{writes.x[m][r], writes.x[m][r + 1]}});
      }
    }
  }

  // --- factors and padding ---

  SPECDEC_DEVICE void clear_keys() const {
    const Global<float> k_out(p_.k_out);
    for (int64_t i = n_ + warp(); i < p_.N; i += kWarps) {
      const int64_t at = ((b_ * p_.N + i) * p_.rec.HK + hk_) * chunk_.DK;
      for (int c = 4 * lane(); c < chunk_.DK; c += 128) k_out.store_vec<4>(at + c, Pack<float, 4>{});
    }
  }

  SPECDEC_DEVICE void write_gates() const {
    if (p_.rec.gate == Gate::kNone) return;
    const Global<float> g_out(p_.g_out);
    const int decays = Traits::kChannel ? chunk_.DK : 1;
    for (int64_t i = thread(); i < p_.N * decays; i += kThreads) {
      const int64_t node = i / decays, c = i % decays;
      const float g = node < n_ ? g_.load(at_token(p_.g_stride, b_, node, hv_) + c) : 0.0f;
      g_out.store(((b_ * p_.N + node) * p_.rec.HV + hv_) * decays + c, g);
    }
  }

  SPECDEC_DEVICE void clear_padding() const {
    for (int i = n_ + warp(); i < p_.N; i += kWarps) {
      if (lane() >= kStateRows / 2) continue;
      const int64_t at = value_at(i) + 2 * lane();
      out_.store2(at, 0.0f, 0.0f);
      u_out_.template store_vec<2>(at, {{0.0f, 0.0f}});
    }
  }

  const Params& p_;
  const Split split_;
  const Elements q_, k_, v_, g_;
  const Global<const float> beta_;
  const Global<const int32_t> parents_;
  const OutElements out_;
  const Global<float> u_out_;
  const Chunk chunk_;
  const StateRows<kWarps> state_;
  int part_, b_, hk_, n_, pending_;
  int64_t slot_;
  int64_t wanted_ = -1;  // the tile of the state that is to be read next, its first element
  int hv_ = 0, tile_ = 0;
};

}  // namespace specdec::cuda
