// Blocks that work on one row of logits at a time, each on its parts of it, and tell each other what they
// found. A long row is more arithmetic than memory, so one block would leave a GPU idle.
//
// Blocks wait for each other. They take their places by a ticket, so whoever waits, waits for blocks that
// have started or will as earlier teams end; kMaxTeam blocks fit on every GPU at a time.
//
// A block has kWorkers threads that pass over rows, and a warp that decides what they do next.
#pragma once

#include "greatest_logit.cuh"

namespace specdec::cuda {

constexpr int kMaxTeam = 16;
constexpr int kTeamBlocks = 128;  // of all teams, where the rows are long enough: one a multiprocessor
constexpr int kMaxParts = 256;    // whose sums fit in shared memory; no race has longer rows
static_assert(int64_t{kMaxParts} * kPartElements == int64_t{1} << kRaceTokenBits);

constexpr int kWorkers = 256;
constexpr int kWorkingWarps = kWorkers / 32;
constexpr int kSamplingThreads = kWorkers + 32;
constexpr int kWorkersBarrier = 1, kCommandBarrier = 2;
SPECDEC_DEVICE bool is_worker() { return warp() < kWorkingWarps; }

struct TeamView {
  int64_t teams = 0;
  int size = 1;                // blocks of a team
  int slots = 0;               // numbers that a team can tell at a time
  uint64_t* values = nullptr;  // [teams, 2, slots]
  // A ticket for each block that starts, the number of blocks that are done, and of every block of every team
  // the meetings it has come to, [teams, size]. Zeros before and after.
  int32_t* counters = nullptr;

  SPECDEC_HOST_DEVICE int64_t blocks() const { return teams * size; }
  SPECDEC_HOST_DEVICE int64_t values_count() const { return teams * 2 * slots; }
  SPECDEC_HOST_DEVICE int64_t counters_count() const { return size > 1 ? 2 + blocks() : 0; }
};

// Teams for rows of V elements; every block has a number of `own` slots for itself.
inline TeamView teams_for(int64_t teams, int64_t V, int own) {
  TeamView view;
  view.teams = teams;
  const int64_t parts = parts_of(V);
  int64_t most = teams > 0 ? kTeamBlocks / teams : 1;
  most = most < 1 ? 1 : most > kMaxTeam ? kMaxTeam : most;
  const int64_t of_block = (parts + most - 1) / most;  // the greatest number of parts sets the time
  view.size = static_cast<int>((parts + of_block - 1) / of_block);
  view.slots = static_cast<int>(parts > view.size * own ? parts : view.size * own);
  return view;
}

class Team {
 public:
  static constexpr int kSharedBytes = 16;

  SPECDEC_DEVICE Team(const TeamView& view, SharedArena& shared) : view_(view) {
    told_ = shared.take<int32_t>(kSharedBytes / 4);
    if (view.size == 1) {
      index_ = block().x;
    } else {
      if (thread() == 0) told_.store(0, Global<int32_t>(view.counters).atomic_add(kTickets, 1));
      barrier();
      index_ = told_.load(0) / view.size;
      rank_ = told_.load(0) % view.size;
    }
    values_ = Global<uint64_t>(view.values) + index_ * 2 * view.slots;
    meetings_ = Global<int32_t>(view.counters) + kMeetings + index_ * view.size;
  }

  SPECDEC_DEVICE int64_t index() const { return index_; }
  SPECDEC_DEVICE int rank() const { return rank_; }
  SPECDEC_DEVICE int size() const { return view_.size; }

  // --- by the workers ---

  // A number for all blocks of the team, which they can get after they have met, until they meet again.
  SPECDEC_DEVICE void put(int slot, uint64_t value) const {
    values_.store((met_ + 1) % 2 * view_.slots + slot, value);
  }
  SPECDEC_DEVICE uint64_t get(int slot) const { return values_.load(met_ % 2 * view_.slots + slot); }

  // The workers of all blocks of the team.
  SPECDEC_DEVICE void meet() {
    ++met_;
    barrier(kWorkersBarrier, kWorkers);
    if (view_.size == 1) return;
    if (thread() == 0) {
      fence();
      meetings_.store_release(rank_, met_);
    }
    if (thread() < view_.size) {
      while (meetings_.load_acquire(thread()) < met_) {
      }
    }
    barrier(kWorkersBarrier, kWorkers);
  }

  // At the end of every block, by all of its threads; the last one leaves zeros.
  SPECDEC_DEVICE void leave() const {
    if (view_.size == 1) return;
    const Global<int32_t> counters(view_.counters);
    barrier();
    if (thread() == 0) {
      fence();
      told_.store(1, counters.atomic_add(kDone, 1) == blocks().x - 1);
    }
    barrier();
    if (told_.load(1) == 0) return;
    if (thread() == 0) fence();
    barrier();
    for (int64_t i = thread(); i < view_.counters_count(); i += kSamplingThreads) counters.store(i, 0);
  }

 private:
  static constexpr int kTickets = 0, kDone = 1, kMeetings = 2;

  TeamView view_;
  Shared<int32_t> told_;
  Global<uint64_t> values_;
  Global<int32_t> meetings_;
  int64_t index_ = 0;
  int rank_ = 0, met_ = 0;
};

SPECDEC_DEVICE uint64_t bits_of(double x) {
  uint64_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}
SPECDEC_DEVICE double double_of(uint64_t bits) {
  double x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}

}  // namespace specdec::cuda
