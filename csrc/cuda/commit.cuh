// commit: the factors of an accepted path become part of the durable state, which is read once and written
// once.
//
// exact  applies them in token order with the operations of the step: bit-equal to decoding the tokens.
// fast   closed form, S <- A o S + sum_j u_j (w_j o k_j)^T with A the decay of the whole path and w_j that of
// the
//        tokens after j: from the last token to the first, w_j grows along.
#pragma once

#include "shared_path.cuh"
#include "state_tile.cuh"
#include "token_stage.cuh"

namespace specdec::cuda {

template <typename Traits>
struct Commit {
  using Params = CommitParams;
  using State = typename Traits::State;
  using Stage = TokenStage<Traits, false>;
  static constexpr int kThreads = Traits::kThreads, kDK = Traits::kDK;
  static constexpr int kLogDecays = Traits::kChannelGate ? kDK : 4;  // floats, of which one is used

  static Launch shape(const Params& p) {
    return {{static_cast<int32_t>(p.B * p.rec.HV * (p.rec.DV / Traits::kRows)), 1, 1},
            Stage::kSharedBytes + SharedPath::shared_bytes(p.path) +
                kLogDecays * static_cast<int64_t>(sizeof(float))};
  }

  SPECDEC_DEVICE static void run(const Params& p, SharedArena shared) {
    const Place at = Place::of<Traits::kRows>(p.rec, block().x);
    const int64_t slot = slot_of(p.slots, at.b, p.state.slots);
    const int m = path_length(p.path, at.b, p.factors.nodes);
    if (slot < 0 || m == 0) return;
    const Global<State> state = Global<State>(static_cast<State*>(p.state.data)) +
                                slot * p.state.slot_stride + (at.hv * p.rec.DV + at.row) * kDK;
    const Stage stage(shared);
    SharedPath path(p.path, shared);
    StateTile<Traits> tile;
    const bool exact = p.mode == CommitMode::kExact;
    if (exact) {
      tile.load(state);
    } else {
      tile.clear();
    }
    path.load(p.path, at.b, m, p.factors.nodes, kThreads);
    const Shared<float> log_decay = shared.take<float>(kLogDecays);  // of the tokens after the one at hand
    stage.run(
        m,
        [&](int bank, int i, int part, int t) {
          stage.copy_factor(p.rec, p.factors, at, bank, i, part, path.node(exact ? t : m - 1 - t));
        },
        [&](int bank, int first, int tokens) {
          if (exact) {
            for (int i = warp(); i < tokens; i += kThreads / 32) stage.prepare_factor(p.rec.gate, bank, i);
          } else {
            stage.prepare_closed(p.rec.gate, bank, tokens, first == 0, log_decay);
          }
        },
        [&](int bank, int i, int) {
          if (exact) {
            tile.replay(stage.k(i), stage.decays(i), stage.decay(i), stage.u(bank, i));
          } else {
            tile.add(stage.k(i), stage.u(bank, i));
          }
        });
    if (exact) {
      tile.store(state);
      return;
    }
    barrier();  // the last log decays
    tile.add_to(state, log_decay, p.rec.gate != Gate::kNone);
  }
};

}  // namespace specdec::cuda
