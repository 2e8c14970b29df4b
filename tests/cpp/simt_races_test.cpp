// Planted races, and accesses under asynchronous copies.
#include "simt_faults.h"

namespace specdec::cuda {
namespace {

// --- races ---

template <bool kFault>
void read_of_neighbour(const TestBuffers& p, SharedArena shared) {
  const Shared<float> s = shared.take<float>(128);
  THERE s.store(thread(), 1.0f);
  if (!kFault) barrier();
  HERE const float x = thread() == 40 ? s.load(3) : 0.0f;
  Global<float>(p.out).store(thread(), x);
}

TEST(SimtRaces, ReadWithoutBarrier) {
  // Where the reader comes first, the place holds no value either: that is another finding.
  expect_race<read_of_neighbour<true>, read_of_neighbour<false>>(
      [](int here, int there) { return here == 40 && there == 3; });
}

template <bool kFault>
void overwritten_too_early(const TestBuffers& p, SharedArena shared) {
  const Shared<float> s = shared.take<float>(128);
  s.store(thread(), 1.0f);
  barrier();
  THERE const float x = s.load(127 - thread());
  if (!kFault) barrier();
  HERE s.store(thread(), 2.0f);
  Global<float>(p.out).store(thread(), x);
}

TEST(SimtRaces, WriteOfWhatOthersStillRead) {
  expect_found<overwritten_too_early<true>, overwritten_too_early<false>>(
      FindingKind::kRace, between([](int here, int there) { return here == 127 - there; }));
}

template <bool kFault>
void two_writers(const TestBuffers&, SharedArena shared) {
  const Shared<float> s = shared.take<float>(128);
  HERE THERE s.store(kFault && thread() == 77 ? 5 : thread(), 1.0f);
}

TEST(SimtRaces, TwoWriters) {
  expect_found<two_writers<true>, two_writers<false>>(
      FindingKind::kRace, between([](int here, int there) { return here + there == 77 + 5; }));
}

// A shuffle makes the lanes meet and orders no memory.
template <bool kFault>
void exchange_in_warp(const TestBuffers& p, SharedArena shared) {
  const Shared<float> s = shared.take<float>(128);
  THERE s.store(thread(), 1.0f);
  if (kFault) {
    shuffle(1.0f, 0);
  } else {
    warp_barrier();
  }
  HERE const float x = s.load(thread() ^ 1);
  Global<float>(p.out).store(thread(), x);
}

TEST(SimtRaces, ShuffleInsteadOfWarpBarrier) {
  expect_found<exchange_in_warp<true>, exchange_in_warp<false>>(
      FindingKind::kRace, between([](int here, int there) { return here == (there ^ 1); }));
}

// Two warps meet at a named barrier; who reads what a third one wrote has not met it.
template <bool kFault>
void half_of_the_block(const TestBuffers& p, SharedArena shared) {
  const Shared<float> s = shared.take<float>(128);
  THERE s.store(thread(), 1.0f);
  barrier(1 + warp() / 2, 64);
  if (kFault) {
    shuffle(0, 0);
  } else {
    barrier(3, 128);
  }
  if (warp() == 3) barrier(4, 64);
  HERE const float x = warp() == 0 ? s.load(64 + lane()) : 0.0f;
  if (warp() == 2) barrier(4, 64);
  Global<float>(p.out).store(thread(), x);
}

TEST(SimtRaces, NamedBarrierOfOtherWarps) {
  expect_race<half_of_the_block<true>, half_of_the_block<false>>(
      [](int here, int there) { return here < 32 && there == here + 64; });
}

// What one warp knows of another travels with barriers: 0 meets 1, then 1 meets 2.
template <bool kFault>
void relay(const TestBuffers& p, SharedArena shared) {
  const Shared<float> s = shared.take<float>(128);
  float x = 0.0f;
  if (warp() == 0) {
    THERE s.store(lane(), 1.0f);
    barrier(1, 64);
  } else if (warp() == 1) {
    if (!kFault) barrier(1, 64);
    barrier(2, 64);
    if (kFault) barrier(1, 64);
  } else if (warp() == 2) {
    barrier(2, 64);
    HERE x = s.load(lane());
  }
  Global<float>(p.out).store(thread(), x);
}

TEST(SimtRaces, OrderTravelsThroughAThirdWarp) {
  expect_race<relay<true>, relay<false>, 96>([](int here, int there) { return here == there + 64; });
}

// Neighbours may write the halves of a word, not the same half; whole words and halves mix.
template <bool kFault>
void halves(const TestBuffers& p, SharedArena shared) {
  const Shared<bfloat16> s = shared.take<bfloat16>(256);
  HERE THERE s.store(kFault && thread() == 9 ? 8 : thread(), round_to<bfloat16>(1.0f));
  s.store(128 + thread(), round_to<bfloat16>(2.0f));
  barrier();
  const Pack<bfloat16, 2> pair = s.load_vec<2>(128 + (thread() ^ 1) / 2 * 2);
  barrier();
  if (thread() < 64) s.store_vec<2>(2 * thread(), pair);
  barrier();
  Global<float>(p.out).store(thread(), float_of(s.load(127 - thread())));
}

TEST(SimtRaces, HalvesOfAWord) {
  expect_race<halves<true>, halves<false>>([](int here, int there) { return here + there == 17; });
}

// --- asynchronous copies ---

template <bool kFault>
void copy_without_wait(const TestBuffers& p, SharedArena shared) {
  const Shared<float> s = shared.take<float>(512);
  copy_async<4>(s, 4 * thread(), Global<const float>(p.in), 4 * thread());
  copy_async_commit();
  if (!kFault) copy_async_wait<0>();
  HERE const float x = s.load(4 * thread() + 1);
  copy_async_wait<0>();
  Global<float>(p.out).store(thread(), x);
}

TEST(SimtRaces, CopyNotWaitedFor) {
  expect_found<copy_without_wait<true>, copy_without_wait<false>>(FindingKind::kAsyncNotWaited, at_here);
}

// Two groups in flight: the first has landed after wait<1>, the second has not.
template <bool kFault>
void copy_wait_for_fewer(const TestBuffers& p, SharedArena shared) {
  const Shared<float> s = shared.take<float>(1024);
  for (int stage = 0; stage < 2; ++stage) {
    copy_async<4>(s, 512 * stage + 4 * thread(), Global<const float>(p.in), 512 * stage + 4 * thread());
    copy_async_commit();
  }
  copy_async_wait<1>();
  HERE const float x = s.load(kFault ? 512 + 4 * thread() : 4 * thread());
  copy_async_wait<0>();
  Global<float>(p.out).store(thread(), x);
}

TEST(SimtRaces, WaitForTooFewGroups) {
  expect_found<copy_wait_for_fewer<true>, copy_wait_for_fewer<false>>(FindingKind::kAsyncNotWaited, at_here);
}

// A wait makes a thread's own copies visible to it; others need a barrier.
template <bool kFault>
void copies_of_others(const TestBuffers& p, SharedArena shared) {
  const Shared<float> s = shared.take<float>(512);
  THERE copy_async<4>(s, 4 * thread(), Global<const float>(p.in), 4 * thread());
  copy_async_commit();
  if (kFault) barrier();
  copy_async_wait<0>();
  if (!kFault) barrier();
  HERE const float x = s.load(4 * (thread() ^ 1));
  Global<float>(p.out).store(thread(), x);
}

TEST(SimtRaces, CopiesOfOthersWithoutABarrier) {
  // Whether the other copy has landed depends on the order: it is a race, or an access under a copy.
  expect_race<copies_of_others<true>, copies_of_others<false>>(
      [](int here, int there) { return here == (there ^ 1); });
}

// The buffer of a pipeline is filled again while others still read it.
template <bool kFault>
void refill(const TestBuffers& p, SharedArena shared) {
  const Shared<float> s = shared.take<float>(512);
  float x = 0.0f;
  for (int round = 0; round < 3; ++round) {
    HERE copy_async<4>(s, 4 * thread(), Global<const float>(p.in), 512 * round + 4 * thread());
    copy_async_commit();
    copy_async_wait<0>();
    barrier();
    THERE x += s.load(511 - 4 * thread());
    if (!kFault) barrier();
  }
  Global<float>(p.out).store(thread(), x);
}

TEST(SimtRaces, RefillOfABufferInUse) {
  expect_race<refill<true>, refill<false>>([](int here, int there) { return here == 127 - there; });
}

template <bool kFault>
void copy_left_behind(const TestBuffers& p, SharedArena shared) {
  const Shared<float> s = shared.take<float>(512);
  HERE copy_async<4>(s, 4 * thread(), Global<const float>(p.in), 4 * thread());
  copy_async_commit();
  if (!kFault || thread() != 70) copy_async_wait<0>();
}

TEST(SimtRaces, CopyNeverWaitedFor) {
  expect_found<copy_left_behind<true>, copy_left_behind<false>>(FindingKind::kAsyncNotWaited, at(70));
}

// A copy that is in no group is not waited for.
template <bool kFault>
void copy_without_commit(const TestBuffers& p, SharedArena shared) {
  const Shared<float> s = shared.take<float>(512);
  HERE copy_async<4>(s, 4 * thread(), Global<const float>(p.in), 4 * thread());
  if (!kFault) copy_async_commit();
  copy_async_wait<0>();
}

TEST(SimtRaces, CopyNotCommitted) {
  expect_found<copy_without_commit<true>, copy_without_commit<false>>(FindingKind::kAsyncNotWaited, at_here);
}

// --- global memory ---

template <bool kFault>
void through_global(const TestBuffers& p, SharedArena) {
  const Global<float> out(p.out);
  THERE out.store(thread(), 1.0f);
  if (!kFault) barrier();
  HERE const float x = out.load(127 - thread());
  out.store(128 + thread(), x);
}

TEST(SimtRaces, GlobalMemoryWithinABlock) {
  expect_race<through_global<true>, through_global<false>>(
      [](int here, int there) { return here == 127 - there; });
}

template <bool kFault>
void overlapping_blocks(const TestBuffers& p, SharedArena) {
  const int size = kFault ? 127 : 128;
  HERE THERE Global<float>(p.out).store(size * block().x + thread(), 1.0f);
}

TEST(SimtRaces, BlocksThatWriteTheSame) {
  expect_found<overlapping_blocks<true>, overlapping_blocks<false>>(
      FindingKind::kRace, between([](int here, int there) { return here + there == 127; }), 4);
}

// Neighbouring halves of a word may belong to different blocks.
template <bool kFault>
void halves_of_blocks(const TestBuffers& p, SharedArena) {
  const Global<bfloat16> out(reinterpret_cast<bfloat16*>(p.out));
  const int i = 2 * thread() + block().x;
  HERE THERE out.store(kFault && thread() == 60 ? i / 2 * 2 : i, round_to<bfloat16>(1.0f));
}

TEST(SimtRaces, HalvesOfAWordInGlobalMemory) {
  expect_found<halves_of_blocks<true>, halves_of_blocks<false>>(
      FindingKind::kRace, between([](int here, int there) { return here == 60 && there == 60; }), 2);
}

// Block 1 leaves numbers for block 0. Each fault leaves out one link of the chain that orders them.
enum class Link { kAll, kBarrierBeforeRelease, kBarrierAfterAcquire, kFenceBeforeAtomic, kFenceAfterAtomic };

template <Link kMissing, bool kAtomic>
void message(const TestBuffers& p, SharedArena) {
  const Global<int32_t> flags(p.flags);
  const Global<float> out(p.out);
  if (block().x == 1) {
    THERE out.store(thread(), 1.0f);
    if (kMissing != Link::kBarrierBeforeRelease) barrier();
    if (thread() == 0 && kAtomic) {
      if (kMissing != Link::kFenceBeforeAtomic) fence();
      flags.atomic_add(0, 1);
    } else if (thread() == 0) {
      flags.store_release(0, 1);
    }
  } else {
    if (thread() == 0 && kAtomic) {
      while (flags.atomic_add(0, 0) == 0) flags.load_acquire(1);
      if (kMissing != Link::kFenceAfterAtomic) fence();
    } else if (thread() == 0) {
      while (flags.load_acquire(0) == 0) {
      }
    }
    if (kMissing != Link::kBarrierAfterAcquire) barrier();
    HERE const float x = out.load(thread() ^ 1);
    out.store(128 + thread(), x);
  }
}

template <Link kMissing, bool kAtomic>
void expect_broken() {
  expect_found<message<kMissing, kAtomic>, message<Link::kAll, kAtomic>>(
      FindingKind::kRace, between([](int here, int there) { return here == (there ^ 1); }), 2);
}

TEST(SimtRaces, ReleaseWithoutBarrier) { expect_broken<Link::kBarrierBeforeRelease, false>(); }
TEST(SimtRaces, AcquireWithoutBarrier) { expect_broken<Link::kBarrierAfterAcquire, false>(); }
TEST(SimtRaces, AtomicWithoutFenceBefore) { expect_broken<Link::kFenceBeforeAtomic, true>(); }
TEST(SimtRaces, AtomicWithoutFenceAfter) { expect_broken<Link::kFenceAfterAtomic, true>(); }

}  // namespace
}  // namespace specdec::cuda
