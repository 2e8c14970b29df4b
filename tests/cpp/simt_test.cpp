// The SIMT executor runs kernels as a GPU would and counts what they do.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "cuda/every_primitive.cuh"
#include "fiber.h"
#include "simt_kernel.h"

namespace specdec::cuda {
namespace {

// --- execution ---

TEST(Simt, FibersAreThoseOfTheBuild) { EXPECT_STREQ(simt::fiber_backend(), SPECDEC_FIBERS); }

TEST(Simt, EveryPrimitiveRunsClean) {
  const int blocks = 5;
  std::vector<float> x(blocks * 256), y(blocks * 64), sum(1);
  std::vector<bfloat16> narrow(256);
  std::vector<int32_t> flags(blocks + 1);
  for (size_t i = 0; i < x.size(); ++i) x[i] = 0.01f * static_cast<float>(i % 17) - 0.05f;
  for (size_t i = 0; i < narrow.size(); ++i) narrow[i] = round_to<bfloat16>(0.1f * static_cast<float>(i % 7));
  simt::Session session;
  session.memory.add("x", x.data(), x.size(), simt::Direction::kInput);
  session.memory.add("narrow", narrow.data(), narrow.size(), simt::Direction::kInput);
  session.memory.add("y", y.data(), y.size(), simt::Direction::kOutput);
  session.memory.add("sum", sum.data(), sum.size(), simt::Direction::kBoth);
  session.memory.add("flags", flags.data(), flags.size(), simt::Direction::kBoth);
  const EveryPrimitiveParams p{x.data(), narrow.data(), y.data(), sum.data(), flags.data(), blocks};
  ASSERT_EQ(launch<EveryPrimitive<bfloat16>>(p, &session), Status::kOk);
  EXPECT_TRUE(session.report.clean()) << session.report.to_string();
  EXPECT_EQ(sum[0], 64.0f * blocks);
  EXPECT_EQ(flags[blocks], blocks);
  EXPECT_EQ(session.memory.at("y").bytes_with_values(), static_cast<int64_t>(y.size() * sizeof(float)));
  EXPECT_EQ(session.report.kernel("EveryPrimitive").kernel, "EveryPrimitive<bfloat16>");
}

// Sums 512 numbers a block through shared memory and shuffles.
void sum_blocks(const TestBuffers& p, SharedArena shared) {
  const Shared<float> s = shared.take<float>(512), totals = shared.take<float>(4);
  copy_async<4>(s, 4 * thread(), Global<const float>(p.in), 512 * block().x + 4 * thread());
  copy_async_commit();
  copy_async_wait<0>();
  barrier();
  float total = 0.0f;
  for (int i = 0; i < 4; ++i) total += s.load(128 * i + 127 - thread());
  for (int mask = 16; mask > 0; mask /= 2) total += shuffle_xor(total, mask);
  if (lane() == 0) totals.store(warp(), total);
  barrier();
  if (thread() < 4) Global<float>(p.out).atomic_add(block().x, totals.load(thread()));
}

TEST(Simt, BlocksShareMemoryAndShuffle) {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    TestSession session(seed);
    ASSERT_EQ(session.run<sum_blocks>(8), Status::kOk);
    EXPECT_TRUE(session.report.clean()) << session.report.to_string();
    for (int b = 0; b < 8; ++b) {
      const auto first = session.in.begin() + 512 * b;
      EXPECT_EQ(session.out[static_cast<size_t>(b)], std::accumulate(first, first + 512, 0.0f));
    }
  }
}

void take_ticket(const TestBuffers& p, SharedArena) {
  if (thread() == 0)
    Global<float>(p.out).store(block().x, static_cast<float>(Global<int32_t>(p.flags).atomic_add(0, 1)));
}

TEST(Simt, SeedOrdersBlocks) {
  std::set<std::vector<float>> orders;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    for (int repeat = 0; repeat < 2; ++repeat) {
      TestSession session(seed);
      session.run<take_ticket, 32>(12);
      std::vector<float> order(session.out.begin(), session.out.begin() + 12);
      orders.insert(order);
      std::sort(order.begin(), order.end());
      for (int i = 0; i < 12; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], static_cast<float>(i));
    }
  }
  EXPECT_EQ(orders.size(), 8u);
}

// Block b waits for block b + 1 and adds to what it left: wrong unless blocks take turns.
void chain_of_blocks(const TestBuffers& p, SharedArena) {
  const Global<int32_t> flags(p.flags);
  const Global<float> out(p.out);
  const int b = block().x;
  if (b + 1 < blocks().x) {
    if (thread() == 0) {
      while (flags.load_acquire(b + 1) == 0) {
      }
    }
    barrier();
    out.store(b * 32 + thread(), out.load((b + 1) * 32 + thread()) + 1.0f);
  } else {
    out.store(b * 32 + thread(), 1.0f);
  }
  barrier();
  if (thread() == 0) {
    fence();
    flags.store_release(b, 1);
  }
}

TEST(Simt, BlocksWaitForFlags) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    TestSession session(seed);
    session.run<chain_of_blocks, 32>(10);
    EXPECT_TRUE(session.report.clean()) << session.report.to_string();
    for (int t = 0; t < 32; ++t) EXPECT_EQ(session.out[static_cast<size_t>(t)], 10.0f);
  }
}

// What an asynchronous copy brings is not there before the wait, whatever was there before is.
void look_before_wait(const TestBuffers& p, SharedArena shared) {
  const Shared<float> s = shared.take<float>(128);
  s.store(thread(), -1.0f);
  copy_async<1>(s, thread(), Global<const float>(p.in), thread());
  copy_async_commit();
  copy_async<1>(s, thread(), Global<const float>(p.in), thread(), false);
  Global<float>(p.out).store(thread(), s.load(thread()));
  copy_async_wait<0>();
  Global<float>(p.out).store(128 + thread(), s.load(thread()));
  copy_async_commit();
  copy_async_wait<0>();
  Global<float>(p.out).store(256 + thread(), s.load(thread()));
}

TEST(Simt, AsynchronousCopiesLandWhenWaitedFor) {
  TestSession session;
  session.run<look_before_wait>();
  EXPECT_FALSE(session.report.clean());
  for (size_t t = 0; t < 128; ++t) {
    EXPECT_EQ(session.out[t], -1.0f);
    EXPECT_EQ(session.out[128 + t], session.in[t]);
    EXPECT_EQ(session.out[256 + t], 0.0f);
  }
}

TEST(Simt, RefusesWhatAGpuRefuses) {
  TestSession session;
  session.buffers.shared_bytes = session.options.shared_limit + 1;
  EXPECT_EQ(session.run<take_ticket>(1), Status::kUnsupported);
  session.buffers.shared_bytes = 0;
  EXPECT_EQ(session.run<take_ticket>(-1), Status::kInvalidArgument);
  EXPECT_EQ(session.run<take_ticket>(0), Status::kOk);
  EXPECT_TRUE(session.report.kernels.empty());
  EXPECT_THROW(session.memory.add("again", &session.in[5], 1, simt::Direction::kInput),
               std::invalid_argument);
}

// A pool whose last slot lies beyond 2^31 elements: only the pages that are touched exist.
struct FarParams {
  float* pool = nullptr;
  int64_t element = 0;
};
struct FarKernel {
  using Params = FarParams;
  static constexpr int kThreads = 32;
  static Launch shape(const Params&) { return {}; }
  static void run(const Params& p, SharedArena) {
    const Global<float> pool = Global<float>(p.pool) + p.element;
    pool.store(thread(), pool.load(thread()) + 1.0f);
  }
};

TEST(Simt, MemoryBeyondThirtyTwoBits) {
  const int64_t elements = (int64_t{1} << 32) + 64;
  const simt::Reservation memory(static_cast<size_t>(elements) * sizeof(float));
  auto* pool = static_cast<float*>(memory.data());
  simt::Session session;
  session.memory.add("pool", pool, static_cast<size_t>(elements), simt::Direction::kBoth);
  EXPECT_EQ(launch<FarKernel>({pool, elements - 32}, &session), Status::kOk);
  EXPECT_TRUE(session.report.clean()) << session.report.to_string();
  EXPECT_EQ(pool[elements - 1], 1.0f);
  EXPECT_EQ(launch<FarKernel>({pool, elements - 31}, &session), Status::kOk);
  EXPECT_EQ(session.report.count(simt::FindingKind::kOutOfBounds), 1);
}

// --- counters ---

template <int Stride, int N>
void read_strided(const TestBuffers& p, SharedArena) {
  Global<const float>(p.in).load_vec<N>(Stride * thread());
}

template <int Stride, int N>
simt::GlobalTraffic reads() {
  TestSession session;
  session.run<read_strided<Stride, N>, 64>();
  EXPECT_TRUE(session.report.clean()) << session.report.to_string();
  const auto& counts = session.report.kernels.at(0);
  EXPECT_EQ(counts.buffers.at(0).name, "in");
  EXPECT_EQ(counts.buffers.at(0).bytes_read, counts.read.bytes);
  EXPECT_EQ(counts.write.requests, 0);
  return counts.read;
}

void expect_traffic(const simt::GlobalTraffic& traffic, int64_t bytes, int64_t requests, int64_t sectors) {
  EXPECT_EQ(traffic.bytes, bytes);
  EXPECT_EQ(traffic.requests, requests);
  EXPECT_EQ(traffic.sectors, sectors);
}

TEST(SimtCounts, SectorsOfGlobalReads) {  // by two warps
  expect_traffic(reads<1, 1>(), 256, 2, 8);
  expect_traffic(reads<2, 1>(), 256, 2, 16);
  expect_traffic(reads<8, 1>(), 256, 2, 64);
  expect_traffic(reads<32, 1>(), 256, 2, 64);
  expect_traffic(reads<0, 1>(), 8, 2, 2);
  expect_traffic(reads<2, 2>(), 512, 4, 16);
  expect_traffic(reads<4, 2>(), 512, 4, 32);
  expect_traffic(reads<4, 4>(), 1024, 8, 32);
  expect_traffic(reads<32, 4>(), 1024, 8, 64);
}

void ragged(const TestBuffers& p, SharedArena) {
  const Global<float> out(p.out);
  for (int i = 0; i < thread() % 3; ++i) out.store(64 * i + thread(), 1.0f);
  if (thread() < 8) out.store_vec<4>(1024 + 4 * thread(), Pack<float, 4>{});
}

TEST(SimtCounts, RequestsOfDivergentLanes) {
  TestSession session;
  session.run<ragged, 32>();
  // Lanes 1, 2, 4, 5, ... of 32 in the first round, 2, 5, 8, ... in the second; then eight lanes of 16 bytes.
  expect_traffic(session.report.kernels.at(0).write, 21 * 4 + 10 * 4 + 128, 3, 4 + 4 + 4);
  EXPECT_EQ(session.report.kernels.at(0).lines.size(), 2u);
}

// Blocks share 100 numbers, which end inside a sector, and block b writes words 2 b and 64 + 16 b.
void share_a_head(const TestBuffers& p, SharedArena) {
  float sum = 0.0f;
  for (int i = thread(); i < 100; i += 32) sum += Global<const float>(p.in).load(i);
  if (thread() > 0) return;
  Global<float>(p.out).store(2 * block().x, sum);
  Global<float>(p.out).store(64 + 16 * block().x, sum);
}

TEST(SimtCounts, FootprintCountsASectorOnceALaunch) {
  TestSession session;
  for (int launches = 1; launches <= 2; ++launches) {
    session.run<share_a_head, 32>(4);
    const simt::KernelCounts& counts = session.report.kernels.at(0);
    EXPECT_EQ(counts.read.bytes, launches * 4 * 400);
    EXPECT_EQ(counts.footprint_read, launches * 13 * 32);  // 400 bytes touch 13 sectors
    EXPECT_EQ(counts.write.bytes, launches * 4 * 2 * 4);
    EXPECT_EQ(counts.footprint_written, launches * (1 + 4) * 32);
    for (const simt::BufferCounts& buffer : counts.buffers) {
      EXPECT_EQ(buffer.footprint_read, buffer.name == "in" ? counts.footprint_read : 0) << buffer.name;
      EXPECT_EQ(buffer.footprint_written, buffer.name == "out" ? counts.footprint_written : 0) << buffer.name;
    }
  }
}

// At one place of the source, lanes 0 to 15 read one buffer and the others another, far from it.
void read_two_buffers(const TestBuffers& p, SharedArena) {
  const Global<const float> in(p.in), out(p.out);
  (thread() < 16 ? in : out).load(thread() % 16);
}

TEST(SimtCounts, LanesThatReadDifferentBuffers) {
  TestSession session;
  session.memory.at("out").set_values(session.memory.at("out").begin(), 64);
  session.run<read_two_buffers, 32>();
  EXPECT_TRUE(session.report.clean()) << session.report.to_string();
  const simt::KernelCounts& counts = session.report.kernels.at(0);
  expect_traffic(counts.read, 128, 1, 4);
  for (const simt::BufferCounts& buffer : counts.buffers) {
    const bool read = buffer.name == "in" || buffer.name == "out";
    EXPECT_EQ(buffer.bytes_read, read ? 64 : 0) << buffer.name;
    EXPECT_EQ(buffer.footprint_read, read ? 64 : 0) << buffer.name;
  }
}

TEST(SimtMemory, AbsentArgumentsAreNoBuffers) {
  simt::Memory memory;
  const float* absent = nullptr;
  float here[4];
  memory.add("g", absent, 100, simt::Direction::kInput);
  memory.add("beta", absent, 100, simt::Direction::kInput);
  memory.add("here", here, 4, simt::Direction::kInput);
  EXPECT_EQ(memory.find(0), nullptr);
  EXPECT_EQ(memory.find(16), nullptr);
  EXPECT_EQ(memory.find(reinterpret_cast<uintptr_t>(here))->name(), "here");
  EXPECT_THROW(memory.add("again", here + 1, 1, simt::Direction::kInput), std::invalid_argument);
}

template <int Stride, int N>
void shared_strided(const TestBuffers&, SharedArena shared) {
  const Shared<float> s = shared.take<float>(4096);
  s.store_vec<N>(Stride * thread(), Pack<float, N>{});
}

template <int Stride, int N>
simt::SharedTraffic shared_stores() {
  TestSession session;
  session.run<shared_strided<Stride, N>, 32>();
  return session.report.kernels.at(0).shared;
}

void expect_ways(const simt::SharedTraffic& traffic, int64_t requests, int64_t ways) {
  EXPECT_EQ(traffic.requests, requests);
  EXPECT_EQ(traffic.wavefronts, requests * ways);
  EXPECT_EQ(traffic.worst, ways);
}

TEST(SimtCounts, BankConflicts) {
  expect_ways(shared_stores<1, 1>(), 1, 1);
  expect_ways(shared_stores<33, 1>(), 1, 1);
  expect_ways(shared_stores<2, 1>(), 1, 2);
  expect_ways(shared_stores<8, 1>(), 1, 8);
  expect_ways(shared_stores<32, 1>(), 1, 32);
  expect_ways(shared_stores<2, 2>(), 2, 1);  // half warps
  expect_ways(shared_stores<4, 2>(), 2, 2);
  expect_ways(shared_stores<32, 2>(), 2, 16);
  expect_ways(shared_stores<4, 4>(), 4, 1);  // quarter warps
  expect_ways(shared_stores<8, 4>(), 4, 2);
  expect_ways(shared_stores<36, 4>(), 4, 1);
  expect_ways(shared_stores<32, 4>(), 4, 8);
}

template <int Stride>
void narrow_strided(const TestBuffers&, SharedArena shared) {
  shared.take<bfloat16>(4096).store(Stride * thread(), bfloat16{});
}

TEST(SimtCounts, BankConflictsOfHalfWords) {
  TestSession neighbours, strided;
  neighbours.run<narrow_strided<1>, 32>();
  strided.run<narrow_strided<64>, 32>();
  expect_ways(neighbours.report.kernels.at(0).shared, 1, 1);
  expect_ways(strided.report.kernels.at(0).shared, 1, 32);
}

void broadcasts(const TestBuffers& p, SharedArena shared) {
  const Shared<float> s = shared.take<float>(128);
  if (thread() < 32) s.store_vec<4>(4 * thread(), Pack<float, 4>{});
  barrier();
  const float x = s.load(5) + s.load(thread() / 16) + s.load_vec<4>(8)[1];
  Global<float>(p.out).store(thread(), x);
}

TEST(SimtCounts, WordsThatLanesShareAreNoConflict) {
  TestSession session;
  session.run<broadcasts, 64>();
  EXPECT_TRUE(session.report.clean()) << session.report.to_string();
  EXPECT_EQ(session.report.kernels.at(0).shared.worst, 1);
  EXPECT_EQ(session.report.kernels.at(0).shared.requests, 4 + 2 * (1 + 1 + 4));
}

void operations(const TestBuffers& p, SharedArena shared) {
  const Shared<bfloat16> s = shared.take<bfloat16>(512);
  copy_async<8>(s, 8 * thread(), Global<const bfloat16>(p.narrow), 8 * thread(), thread() < 32);
  copy_async_commit();
  copy_async_wait<0>();
  barrier();
  uint32_t r[4];
  load_matrix(r, s, 8 * lane());
  float d[4] = {};
  for (int i = 0; i < 3; ++i) mma_bf16(d, r, {r[0], r[1]});
  mma_tf32(d, d, {d[0], d[1]});
  if (warp() == 0) warp_barrier();
  barrier(1, 64);
  if (any(d[0] > 0.0f)) d[0] = shuffle_down(d[0], 1);
  Global<float>(p.out).store_vec<4>(256 * block().x + 4 * thread(), Pack<float, 4>{{d[0], d[1], d[2], d[3]}});
}

TEST(SimtCounts, Operations) {
  TestSession session;
  session.run<operations, 64>(3);
  session.run<operations, 64>(2);
  EXPECT_TRUE(session.report.clean()) << session.report.to_string();
  ASSERT_EQ(session.report.kernels.size(), 1u);
  const auto& counts = session.report.kernels[0];
  EXPECT_EQ(counts.launches, 2);
  EXPECT_EQ(counts.blocks, 5);
  EXPECT_EQ(counts.async_bytes, 5 * 512);
  EXPECT_EQ(counts.read.bytes, 5 * 512);
  EXPECT_EQ(counts.write.bytes, 5 * 1024);
  EXPECT_EQ(counts.barriers, 5 * 2);
  EXPECT_EQ(counts.warp_barriers, 5);
  EXPECT_EQ(counts.load_matrices, 5 * 2);
  EXPECT_EQ(counts.mma_bf16, 5 * 6);
  EXPECT_EQ(counts.mma_tf32, 5 * 2);
  EXPECT_EQ(counts.votes, 5 * 2);
  EXPECT_EQ(counts.shuffles, 5 * 2);
  EXPECT_EQ(counts.shared.worst, 1);
}

}  // namespace
}  // namespace specdec::cuda
