// Planted faults: addresses, values, barriers, absent lanes, deadlocks; and how they are reported.
#include "simt_faults.h"

namespace specdec::cuda {
namespace {

// --- addresses ---

template <bool kFault>
void past_shared_array(const TestBuffers& p, SharedArena shared) {
  const Shared<float> s = shared.take<float>(128), behind = shared.take<float>(1);
  s.store(thread(), 1.0f);
  if (thread() == 0) behind.store(0, 2.0f);
  barrier();
  HERE const float x = (s + 1).load(kFault || thread() < 127 ? thread() : 0);
  Global<float>(p.out).store(thread(), x);
}

TEST(SimtFaults, PastAnArrayInSharedMemory) {
  expect_found<past_shared_array<true>, past_shared_array<false>>(FindingKind::kOutOfBounds, at(127));
}

template <bool kFault>
void too_much_shared(const TestBuffers&, SharedArena shared) {
  HERE shared.take<float>(kFault ? 4097 : 4096);
}

TEST(SimtFaults, MoreSharedMemoryThanAskedFor) {
  expect_found<too_much_shared<true>, too_much_shared<false>>(FindingKind::kOutOfBounds, at_here);
}

template <bool kFault>
void past_global(const TestBuffers& p, SharedArena) {
  const Global<const float> in(p.in);
  HERE const float x = in.load(kFault && thread() == 31 ? TestSession::kElements : thread());
  Global<float>(p.out).store(thread(), x);
}

TEST(SimtFaults, PastABuffer) {
  expect_found<past_global<true>, past_global<false>>(FindingKind::kOutOfBounds, at(31));
}

template <bool kFault>
void before_global(const TestBuffers& p, SharedArena) {
  const Global<float> out = Global<float>(p.out) + 4;
  HERE out.store_vec<4>(kFault && thread() == 2 ? -8 : 4 * thread(), Pack<float, 4>{});
}

TEST(SimtFaults, BeforeABuffer) {
  expect_found<before_global<true>, before_global<false>>(FindingKind::kOutOfBounds, at(2));
}

template <bool kFault>
void null_pointer(const TestBuffers& p, SharedArena) {
  HERE Global<float>(kFault ? nullptr : p.out).store(thread(), 1.0f);
}

TEST(SimtFaults, NullPointer) {
  expect_found<null_pointer<true>, null_pointer<false>>(FindingKind::kOutOfBounds, at_here);
}

template <bool kFault>
void misaligned_global(const TestBuffers& p, SharedArena) {
  const Global<const float> in = Global<const float>(p.in) + (kFault && thread() == 17 ? 2 : 0);
  HERE const Pack<float, 4> x = in.load_vec<4>(4 * thread());
  Global<float>(p.out).store_vec<4>(4 * thread(), x);
}

TEST(SimtFaults, MisalignedInGlobalMemory) {
  expect_found<misaligned_global<true>, misaligned_global<false>>(FindingKind::kMisaligned, at(17));
}

template <bool kFault>
void misaligned_shared(const TestBuffers&, SharedArena shared) {
  const Shared<float> s = shared.take<float>(258);
  HERE s.store_vec<2>(2 * thread() + (kFault && thread() == 100 ? 1 : 0), Pack<float, 2>{});
}

TEST(SimtFaults, MisalignedInSharedMemory) {
  expect_found<misaligned_shared<true>, misaligned_shared<false>>(FindingKind::kMisaligned, at(100));
}

// --- values ---

template <bool kFault>
void unwritten_shared(const TestBuffers& p, SharedArena shared) {
  const Shared<bfloat16> s = shared.take<bfloat16>(128);
  if (!kFault || thread() != 6) s.store(thread(), round_to<bfloat16>(1.0f));
  barrier();
  HERE const float x = float_of(s.load(127 - thread()));
  Global<float>(p.out).store(thread(), x);
}

TEST(SimtFaults, SharedMemoryNobodyWrote) {
  expect_found<unwritten_shared<true>, unwritten_shared<false>>(FindingKind::kUninitialized, at(121));
}

template <bool kFault>
void unwritten_output(const TestBuffers& p, SharedArena) {
  const Global<float> out(p.out);
  out.store(2 * thread(), 1.0f);
  HERE const float x = out.load(2 * thread() + (kFault && thread() == 8 ? 1 : 0));
  out.store(1000 + thread(), x);
}

TEST(SimtFaults, OutputNobodyWrote) {
  expect_found<unwritten_output<true>, unwritten_output<false>>(FindingKind::kUninitialized, at(8));
}

template <bool kFault>
void padding(const TestBuffers& p, SharedArena) {
  HERE const float x = Global<const float>(p.in).load(kFault || thread() < 100 ? thread() : 0);
  Global<float>(p.out).store(thread(), x);
}

TEST(SimtFaults, PaddingOfAnInput) {
  expect_found<padding<true>, padding<false>>(
      FindingKind::kUninitialized,
      [](const Finding& f) { return at_here(f) && f.thread >= 100 && f.count == 28; }, 1,
      [](TestSession& session) {
        session.memory.at("in").clear_values(reinterpret_cast<uintptr_t>(&session.in[100]),
                                             28 * sizeof(float));
      });
}

template <bool kFault>
void write_to_input(const TestBuffers& p, SharedArena) {
  float* const target = kFault && thread() == 50 ? const_cast<float*>(p.in) : p.out;
  HERE Global<float>(target).store(thread(), 1.0f);
}

TEST(SimtFaults, WriteToAnInput) {
  expect_found<write_to_input<true>, write_to_input<false>>(FindingKind::kReadOnly, at(50));
}

// --- barriers and lanes ---

template <bool kFault>
void early_return(const TestBuffers&, SharedArena) {
  if (kFault && thread() == 90) return;
  HERE barrier();
}

TEST(SimtFaults, BarrierAfterAReturn) {
  expect_found<early_return<true>, early_return<false>>(FindingKind::kBarrier, [](const Finding& f) {
    return at_here(f) && f.thread != 90 && f.other_thread == 90;
  });
}

template <bool kFault>
void two_places(const TestBuffers&, SharedArena) {
  if (kFault && warp() == 1) {
    THERE barrier();
  } else {
    HERE barrier();
  }
}

TEST(SimtFaults, BarrierInTwoPlaces) {
  expect_found<two_places<true>, two_places<false>>(
      FindingKind::kBarrier, between([](int here, int there) { return here / 32 != 1 && there / 32 == 1; }));
}

template <bool kFault>
void part_of_a_warp(const TestBuffers&, SharedArena) {
  const bool first = kFault ? thread() % 2 == 0 : thread() < 64;
  if (first) {
    HERE barrier(1, 64);
  }
}

TEST(SimtFaults, NamedBarrierByPartsOfWarps) {
  expect_found<part_of_a_warp<true>, part_of_a_warp<false>>(FindingKind::kBarrier, at_here);
}

template <bool kFault>
void different_counts(const TestBuffers&, SharedArena) {
  HERE THERE barrier(1, kFault && warp() == 3 ? 96 : 128);
}

TEST(SimtFaults, NamedBarrierWithDifferentCounts) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    TestSession session(seed);
    session.run<different_counts<true>>();
    EXPECT_GE(session.report.count(FindingKind::kBarrier), 1);
    for (const Finding& f : session.report.findings) EXPECT_EQ(f.line, fault_line) << f.to_string();
    TestSession right(seed);
    right.run<different_counts<false>>();
    EXPECT_TRUE(right.report.clean()) << right.report.to_string();
  }
}

template <bool kFault>
void crossed(const TestBuffers&, SharedArena) {
  const int first = kFault && warp() >= 2 ? 2 : 1;
  HERE barrier(first, 128);
  barrier(3 - first, 128);
}

TEST(SimtFaults, CrossedBarriers) {
  expect_found<crossed<true>, crossed<false>>(FindingKind::kBarrier, at_here);
}

template <bool kFault>
void shuffle_in_branch(const TestBuffers& p, SharedArena) {
  float x = 1.0f;
  if (!kFault || lane() < 16) {
    HERE x = shuffle_xor(x, 1);
  }
  Global<float>(p.out).store(thread(), x);
}

TEST(SimtFaults, ShuffleInABranch) {
  expect_found<shuffle_in_branch<true>, shuffle_in_branch<false>>(
      FindingKind::kAbsentLanes, [](const Finding& f) { return at_here(f) && f.thread % 32 < 16; });
}

template <bool kFault>
void different_operations(const TestBuffers& p, SharedArena) {
  float x = 1.0f;
  if (kFault && lane() == 5) {
    HERE x += any(true) ? 1.0f : 0.0f;
  } else {
    THERE x += shuffle(x, 0);
  }
  Global<float>(p.out).store(thread(), x);
}

TEST(SimtFaults, DifferentOperations) {
  expect_found<different_operations<true>, different_operations<false>>(
      FindingKind::kAbsentLanes,
      between([](int here, int there) { return here % 32 == 5 && here / 32 == there / 32; }));
}

// --- flags ---

template <bool kFault>
void wait_for_next_block(const TestBuffers& p, SharedArena) {
  const Global<int32_t> flags(p.flags);
  if (thread() == 0) {
    if (!kFault || block().x != 3) flags.store_release(block().x, 1);
    HERE while (flags.load_acquire((block().x + 1) % p.blocks) == 0) {}
  }
  barrier();
}

TEST(SimtFaults, FlagThatNobodySets) {
  expect_found<wait_for_next_block<true>, wait_for_next_block<false>>(
      FindingKind::kDeadlock, [](const Finding& f) { return at_here(f) && f.thread == 0 && f.block.x == 2; },
      8);
}

void meet_all_blocks(const TestBuffers& p, SharedArena) {
  const Global<int32_t> flags(p.flags);
  if (thread() == 0) {
    fence();
    flags.atomic_add(0, 1);
    HERE while (flags.load_acquire(0) < p.blocks) {}
  }
  barrier();
}

// Blocks that wait for each other must be in execution at the same time.
TEST(SimtFaults, MoreBlocksWaitThanFit) {
  for (const bool fault : {true, false}) {
    TestSession session;
    session.options.resident_blocks = fault ? 7 : 8;
    session.run<meet_all_blocks>(8);
    EXPECT_EQ(session.report.count(FindingKind::kDeadlock), fault ? 1 : 0) << session.report.to_string();
    for (const Finding& f : session.report.findings) EXPECT_EQ(f.line, fault_line);
  }
}

template <bool kFault>
void spin_without_acquire(const TestBuffers& p, SharedArena) {
  const Global<int32_t> flags(p.flags);
  if (thread() == 33) {
    HERE while (kFault && flags.load(0) == 0) {}
  }
}

TEST(SimtFaults, SpinWithoutAcquire) {
  TestSession session;
  session.run<spin_without_acquire<true>>();
  ASSERT_EQ(session.report.findings.size(), 1u) << session.report.to_string();
  EXPECT_EQ(session.report.findings[0].kind, FindingKind::kDeadlock);
  EXPECT_EQ(session.report.findings[0].line, fault_line);
  EXPECT_EQ(session.report.findings[0].thread, 33);
  TestSession right;
  right.run<spin_without_acquire<false>>();
  EXPECT_TRUE(right.report.clean()) << right.report.to_string();
}

// --- the report ---

template <bool kFault>
void many_faults(const TestBuffers& p, SharedArena) {
  const Global<const float> in(p.in);
  HERE float x = kFault ? in.load(-1) : 0.0f;
  THERE x += kFault ? in.load(1 << 20) : 0.0f;
  if (kFault) Global<float>(const_cast<float*>(p.in)).store(0, x);
}

TEST(SimtFaults, OneRunCollectsAll) {
  TestSession session;
  session.run<many_faults<true>>(3);
  ASSERT_EQ(session.report.findings.size(), 3u) << session.report.to_string();
  EXPECT_EQ(session.report.findings[0].line, fault_line);
  EXPECT_EQ(session.report.findings[0].count, 3 * 128);
  EXPECT_EQ(session.report.findings[1].line, other_line);
  EXPECT_EQ(session.report.findings[2].kind, FindingKind::kReadOnly);
  EXPECT_NE(session.report.to_string().find("simt_faults_test.cpp:" + std::to_string(fault_line) +
                                            ": out of bounds"),
            std::string::npos)
      << session.report.to_string();
  TestSession limited;
  limited.options.finding_limit = 2;
  limited.run<many_faults<true>>();
  EXPECT_EQ(limited.report.findings.size(), 2u);
  EXPECT_TRUE(limited.report.findings_dropped);
}

}  // namespace
}  // namespace specdec::cuda
