// Hybrid verification: the heavy-light chains of a tree run side by side, one block a chain and tile of value
// rows. A state from which other chains start goes through memory, written by its chain's block and read by
// theirs, once a chain; nothing else does.
//
// One launch. Which chains there are stands in parents, on the device; a launch a wave would be sized for the
// worst tree and would run mostly empty blocks, log2 n times over, and each would build the walk anew. The
// state traffic of both is the same. So a block waits for the state that its chain starts from. Blocks take
// their work by a ticket, chains in the order of waves: whoever waits, waits for a block that has started.
#pragma once

#include "stepper.cuh"
#include "tree_walk.cuh"

namespace specdec::cuda {

struct HybridParams {
  VerifyParams verify;
  float* states = nullptr;  // [tiles of all heads, kept states, rows, DK]
  int32_t* counters =
      nullptr;  // tickets taken, blocks done, then flags [tiles of all heads, 1 + kept states]
};

template <typename Traits>
struct VerifyHybrid {
  using Params = HybridParams;
  using Tile = StateTile<Traits>;
  static constexpr int kThreads = Traits::kThreads;

  // Tiles of value rows of all heads and sequences.
  SPECDEC_HOST_DEVICE static int64_t tiles(const VerifyParams& p) {
    return p.B * p.rec.HV * (p.rec.DV / Traits::kRows);
  }
  // States that chains of one tree can start from: each has two children, and n nodes are at least 2 m + 1.
  SPECDEC_HOST_DEVICE static int64_t kept(const VerifyParams& p) {
    const int64_t nodes = p.N + (p.has_prefix ? p.prefix.nodes : 0);
    return nodes > 0 ? (nodes - 1) / 2 : 0;
  }
  // A chain ends in a new leaf.
  SPECDEC_HOST_DEVICE static int64_t blocks_wanted(const VerifyParams& p) {
    return tiles(p) * (p.N > 1 ? p.N : 1);
  }
  static int64_t states_count(const VerifyParams& p) { return tiles(p) * kept(p) * Tile::kSavedFloats; }
  static int64_t counters_count(const VerifyParams& p) { return kFlags + tiles(p) * (1 + kept(p)); }

  static Launch shape(const Params& p) {
    return {{static_cast<int32_t>(blocks_wanted(p.verify)), 1, 1},
            Stepper<Traits>::shared_bytes(p.verify) + TreeWalk::kSharedBytes + 16};
  }

  SPECDEC_DEVICE static void run(const Params& params, SharedArena shared) {
    const Shared<int32_t> told = shared.take<int32_t>(4);  // what thread 0 tells the block
    const Global<int32_t> counters(params.counters);
    if (thread() == 0) told.store(0, counters.atomic_add(kTickets, 1));
    barrier();
    const int32_t ticket = told.load(0);
    run_chain(params, static_cast<int>(ticket / tiles(params.verify)), ticket % tiles(params.verify), shared);

    // The last block leaves zeros for the next launch.
    barrier();
    if (thread() == 0) {
      fence();
      told.store(1, counters.atomic_add(kDone, 1) == blocks().x - 1);
    }
    barrier();
    if (told.load(1) == 0) return;
    const int64_t count = kFlags + tiles(params.verify) * (1 + kept(params.verify));
    for (int64_t i = thread(); i < count; i += kThreads) counters.store(i, 0);
  }

 private:
  static constexpr int kTickets = 0, kDone = 1, kFlags = 4;

  SPECDEC_DEVICE static void run_chain(const Params& params, int index, int64_t tile, SharedArena& shared) {
    const VerifyParams& p = params.verify;
    const Place at = Place::of<Traits::kRows>(p.rec, tile);
    const Sequence s = Sequence::of(p, at.b);
    const bool first = index == 0;
    if (first) clear_padding<Traits>(p, at, s.length);
    if (s.length == 0 && (s.pending == 0 || !first)) return;
    Stepper<Traits> stepper(p, at, s, shared);
    TreeWalk walk(shared);
    walk.build(p, at.b, s.length);
    const TreeWalk::Chain chain = walk.cut_chain(index);
    if (chain.nodes == 0 && !first) return;

    const int64_t kept_states = kept(p);
    const Global<int32_t> flags = Global<int32_t>(params.counters) + kFlags + tile * (1 + kept_states);
    const Global<float> states = Global<float>(params.states) + tile * kept_states * Tile::kSavedFloats;
    // Flag 0: the committed state is settled. Flag 1 + i: kept state i is there.
    const auto wait = [&](int flag) {
      if (thread() == 0) {
        while (flags.load_acquire(flag) == 0) {
        }
      }
      barrier();
    };
    const auto tell = [&](int flag) {
      barrier();
      if (thread() == 0) {
        fence();
        flags.store_release(flag, 1);
      }
    };
    if (chain.source >= 0) {
      wait(1 + chain.source);
      stepper.tile.restore(states + int64_t{chain.source} * Tile::kSavedFloats);
    } else {
      if (!first && s.pending > 0) wait(0);
      stepper.load_durable();
    }
    if (first) stepper.load_path();
    stepper.run(
        first ? s.pending : 0, chain.nodes, [&](int i) { return walk.visit(i); }, [&] { tell(0); },
        [](const Visit&) {},
        [&](const Visit& visit) {
          if (visit.action != Visit::kSave) return;
          stepper.tile.save(states + int64_t{visit.slot} * Tile::kSavedFloats);
          tell(1 + visit.slot);
        });
  }
};

}  // namespace specdec::cuda
