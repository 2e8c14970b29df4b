// Stepping tokens on a tile of the state: what serial and hybrid verification share.
#pragma once

#include "shared_path.cuh"
#include "state_tile.cuh"
#include "token_stage.cuh"
#include "tree_walk.cuh"

namespace specdec::cuda {

// One row of a call.
struct Sequence {
  int64_t slot = -1;  // negative: padding
  int length = 0;     // new nodes
  int pending = 0;    // pending factors

  SPECDEC_DEVICE static Sequence of(const VerifyParams& p, int64_t b) {
    Sequence s;
    s.slot = slot_of(p.slots, b, p.state.slots);
    if (s.slot < 0) return s;
    s.length = length_of(p.lengths, b, p.N);
    if (p.has_pending) s.pending = path_length(p.pending_path, b, p.pending.nodes);
    return s;
  }
};

// Zeros for the tokens from `length` on: the tile's rows of out and u, by the first tile the keys and gates.
template <typename Traits>
SPECDEC_DEVICE void clear_padding(const VerifyParams& p, const Place& at, int length) {
  const Recurrence& rec = p.rec;
  const bool keys = at.first && at.hv % (rec.HV / rec.HK) == 0;
  const int gates = !at.first || rec.gate == Gate::kNone ? 0 : Traits::kChannelGate ? Traits::kDK : 1;
  SPECDEC_ROLL
  for (int64_t n = length; n < p.N; ++n) {
    const int64_t token = at.b * p.N + n, head = token * rec.HV + at.hv;
    SPECDEC_ROLL
    for (int i = thread(); i < Traits::kRows; i += Traits::kThreads) {
      Global<float>(p.u_out).store(head * rec.DV + at.row + i, 0.0f);
      store_float(p.out, p.dtype, head * rec.DV + at.row + i, 0.0f);
    }
    if (keys) {
      SPECDEC_ROLL
      for (int i = thread(); i < Traits::kDK; i += Traits::kThreads) {
        Global<float>(p.k_out).store((token * rec.HK + at.hk) * Traits::kDK + i, 0.0f);
      }
    }
    SPECDEC_ROLL
    for (int i = thread(); i < gates; i += Traits::kThreads)
      Global<float>(p.g_out).store(head * gates + i, 0.0f);
  }
}

// Where new tokens come from: q, k, v, g and beta as they were given.
struct GivenTokens {
  // By a warp: part `part` of token n as token i of a bank of the stage.
  template <typename Stage>
  SPECDEC_DEVICE void copy(const Stage& stage, const VerifyParams& p, const Place& at, int bank, int i,
                           int part, int64_t n) const {
    stage.copy_new(p, at, bank, i, part, n);
  }
};

template <typename Traits, typename Tokens = GivenTokens>
class Stepper {
  using Tile = StateTile<Traits>;
  using State = typename Traits::State;
  using Stage = TokenStage<Traits, true>;

 public:
  static int64_t shared_bytes(const VerifyParams& p) {
    return Stage::kSharedBytes + (p.has_pending ? SharedPath::shared_bytes(p.pending_path) : 0);
  }

  Tile tile;

  SPECDEC_DEVICE Stepper(const VerifyParams& p, const Place& at, const Sequence& s, SharedArena& shared,
                         const Tokens& tokens = Tokens())
      : p_(p),
        at_(at),
        s_(s),
        tokens_(tokens),
        prefix_(p.has_prefix ? static_cast<int>(p.prefix.nodes) : 0),
        stage_(shared),
        durable_(Global<State>(static_cast<State*>(p.state.data)) + s.slot * p.state.slot_stride +
                 (at.hv * p.rec.DV + at.row) * Traits::kDK) {
    if (p.has_pending) path_ = SharedPath(p.pending_path, shared);
  }

  SPECDEC_DEVICE void load_durable() { tile.load(durable_); }

  // By the whole block, before `run` with pending factors.
  SPECDEC_DEVICE void load_path() {
    if (s_.pending > 0) path_.load(p_.pending_path, at_.b, s_.pending, p_.pending.nodes, Traits::kThreads);
  }

  // Folds `pending` factors into the tile, writes it back and calls folded(), then steps `count` visits,
  // visit_of(i), between before(visit), with the tile at the state that the last visit has left, and
  // after(visit). All by the whole block.
  template <typename VisitOf, typename Folded, typename Before, typename After>
  SPECDEC_DEVICE void run(int pending, int count, VisitOf&& visit_of, Folded&& folded, Before&& before,
                          After&& after) {
    const auto node_of = [&](int t) { return t < pending ? -1 : visit_of(t - pending).node; };
    stage_.run(
        pending + count,
        [&](int bank, int i, int part, int t) {
          const int node = node_of(t);
          if (node < 0) {
            stage_.copy_factor(p_.rec, p_.pending, at_, bank, i, part, path_.node(t));
          } else if (node < prefix_) {
            stage_.copy_factor(p_.rec, p_.prefix, at_, bank, i, part, node);
          } else {
            tokens_.copy(stage_, p_, at_, bank, i, part, node - prefix_);
          }
        },
        [&](int bank, int first, int tokens) {
          for (int i = warp(); i < tokens; i += Traits::kThreads / 32) {
            const int node = node_of(first + i);
            if (node < prefix_) {
              stage_.prepare_factor(p_.rec.gate, bank, i);
            } else {
              stage_.prepare_new(p_, at_, bank, i, node - prefix_);
            }
          }
        },
        [&](int bank, int i, int t) {
          if (t < pending) {
            replay(bank, i);
            if (t == pending - 1) {
              tile.store(durable_);
              folded();
            }
            return;
          }
          const Visit visit = visit_of(t - pending);
          before(visit);
          if (visit.node < prefix_) {
            replay(bank, i);
          } else {
            step(bank, i, visit.node - prefix_, visit.leaf);
          }
          after(visit);
        });
  }

 private:
  SPECDEC_DEVICE void replay(int bank, int i) {
    tile.replay(stage_.k(i), stage_.decays(i), stage_.decay(i), stage_.u(bank, i));
  }

  SPECDEC_DEVICE void step(int bank, int i, int64_t n, bool leaf) {
    const int row = Tile::row() + Tile::own_row();
    const float a = stage_.decay(i);
    float sk, sq;
    tile.ask(stage_.k(i), stage_.q(i), stage_.decays(i), &sk, &sq);
    if constexpr (!Traits::kChannelGate) {
      sk = a * sk;
      sq = a * sq;
    }
    float u = stage_.v(bank, i).load(p_.dtype, row);
    if (p_.rec.update == Update::kDelta) u = stage_.beta(i) * (u - sk);
    const int64_t to = ((at_.b * p_.N + n) * p_.rec.HV + at_.hv) * p_.rec.DV + at_.row + row;
    if (Tile::speaks()) {
      if (Tile::speaks_for_keys()) {
        Global<float>(p_.u_out).store(to, u);
      } else {
        store_float(p_.out, p_.dtype, to, sq + u * stage_.kq(i));
      }
    }
    if (!leaf) tile.advance(stage_.k(i), a, u);
  }

  const VerifyParams& p_;
  const Place& at_;
  const Sequence& s_;
  const Tokens tokens_;
  const int prefix_;
  Stage stage_;
  Global<State> durable_;
  SharedPath path_;
};

}  // namespace specdec::cuda
