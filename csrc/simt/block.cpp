#include "block.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <random>

#include "executor.h"

namespace specdec::simt {

Block::Block(int thread_count, int64_t bytes)
    : threads(static_cast<size_t>(thread_count)),
      warps(static_cast<size_t>(thread_count / kWarpSize)),
      shared_bytes(bytes),
      shared(static_cast<char*>(std::aligned_alloc(128, static_cast<size_t>((bytes + 128) / 128 * 128))),
             std::free),
      shadow(bytes, thread_count / kWarpSize) {
  if (shared == nullptr) throw std::bad_alloc();
  for (size_t w = 0; w < warps.size(); ++w) {
    warps[w].index = static_cast<int>(w);
    warps[w].joined.resize(warps.size());
    warp_order.push_back(static_cast<int>(w));
  }
  for (size_t t = 0; t < threads.size(); ++t) {
    Thread& thread = threads[t];
    thread.block = this;
    thread.warp = &warps[t / kWarpSize];
    thread.index = static_cast<int>(t);
    thread.lane = static_cast<int>(t % kWarpSize);
    thread.warp->lanes[thread.lane] = &thread;
  }
}

void Block::start(cuda::Index3 at, int64_t in_grid, uint64_t seed) {
  index = at;
  number = in_grid;
  done = 0;
  failed = false;
  std::mt19937_64 random(seed);
  rotation = static_cast<uint32_t>(random() % kWarpSize);
  std::shuffle(warp_order.begin(), warp_order.end(), random);
  for (Barrier& barrier : barriers) {
    barrier.expected = 0;
    barrier.arrived.clear();
  }
  // Everything of the block before comes before everything of this one.
  uint32_t epoch = 0;
  for (const Warp& warp : warps) epoch = std::max(epoch, warp.epoch);
  for (Warp& warp : warps) {
    warp.epoch = epoch + 1;
    std::fill(warp.joined.begin(), warp.joined.end(), epoch);
    warp.ready = ~uint32_t{0};
    warp.polling = warp.waiting = warp.done = 0;
    warp.at_operation = 0;
  }
  shadow.start_block();
  // A kernel that reads what nobody wrote gets no zeros.
  std::fill_n(shared.get(), shared_bytes, static_cast<char>(0xff));
  for (Thread& thread : threads) {
    thread.sync = Sync::kNone;
    thread.records.clear();
    thread.copies.clear();
    thread.groups = 0;
    thread.known = thread.learned = thread.fenced = nullptr;
    thread.flag = 0;
    thread.fiber.start(&Executor::thread_main, &thread);
  }
}

void Block::run() {
  bool ran = true;
  while (ran && !failed) {
    ran = false;
    for (const int w : warp_order) {
      Warp& warp = warps[static_cast<size_t>(w)];
      while (warp.ready != 0 && !failed) {
        const uint32_t rotated = warp.ready >> rotation | warp.ready << (-rotation & 31);
        const int lane =
            static_cast<int>((static_cast<uint32_t>(__builtin_ctz(rotated)) + rotation) % kWarpSize);
        warp.ready &= ~(uint32_t{1} << lane);
        Thread& thread = *warp.lanes[lane];
        thread.calls = 0;
        current = &thread;
        thread.fiber.resume();
        ran = true;
      }
    }
  }
  current = nullptr;
}

}  // namespace specdec::simt
