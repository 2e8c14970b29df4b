// Serial verification: a block owns a tile of value rows of one head of one sequence, reads it once, folds
// what is pending into it and writes it back once, and steps all new tokens on it while it stays in
// registers. Chains need nothing else; a tree is walked depth first, states with several children wait in
// shared memory.
#pragma once

#include "stepper.cuh"
#include "tree_walk.cuh"

namespace specdec::cuda {

// Slots for the states that a call's trees keep at a time.
SPECDEC_HOST_DEVICE int saved_states(const VerifyParams& p) {
  return TreeWalk::slots(p.N + (p.has_prefix ? p.prefix.nodes : 0));
}

// All new nodes and pending factors of a row on the tile of the block.
template <typename Traits, typename Tokens>
SPECDEC_DEVICE void verify_tile(const VerifyParams& p, const Place& at, const Sequence& s,
                                const Tokens& tokens, SharedArena& shared) {
  using Tile = StateTile<Traits>;
  const int prefix = p.has_prefix ? static_cast<int>(p.prefix.nodes) : 0;
  Stepper<Traits, Tokens> stepper(p, at, s, shared, tokens);
  stepper.load_durable();
  stepper.load_path();
  const bool tree = TreeWalk::wanted(p);
  int count = s.length == 0 ? 0 : prefix + s.length;
  TreeWalk walk;
  Shared<float> saved;
  if (tree) {
    walk = TreeWalk(shared);
    saved = shared.take<float>(saved_states(p) * Tile::kSavedFloats);
    walk.build(p, at.b, s.length);
    count = walk.order_nodes();
  }
  stepper.run(
      s.pending, count,
      // The last node of a chain answers, nobody reads its state.
      [&](int i) { return tree ? walk.visit(i) : Visit{i, i == count - 1, Visit::kNothing, 0}; }, [] {},
      [&](const Visit& visit) {
        if (visit.action == Visit::kSave) stepper.tile.save(saved + visit.slot * Tile::kSavedFloats);
        if (visit.action == Visit::kRestore) stepper.tile.restore(saved + visit.slot * Tile::kSavedFloats);
      },
      [](const Visit&) {});
}

template <typename Traits>
struct VerifySerial {
  using Params = VerifyParams;
  using Tile = StateTile<Traits>;
  static constexpr int kThreads = Traits::kThreads;

  static Launch shape(const Params& p) {
    int64_t bytes = Stepper<Traits>::shared_bytes(p);
    if (TreeWalk::wanted(p))
      bytes += TreeWalk::kSharedBytes + saved_states(p) * Tile::kSavedFloats * int64_t{4};
    return {{static_cast<int32_t>(p.B * p.rec.HV * (p.rec.DV / Traits::kRows)), 1, 1}, bytes};
  }

  SPECDEC_DEVICE static void run(const Params& p, SharedArena shared) {
    const Place at = Place::of<Traits::kRows>(p.rec, block().x);
    const Sequence s = Sequence::of(p, at.b);
    clear_padding<Traits>(p, at, s.length);
    if (s.length == 0 && s.pending == 0) return;
    verify_tile<Traits>(p, at, s, GivenTokens(), shared);
  }
};

}  // namespace specdec::cuda
