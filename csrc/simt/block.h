// The threads, warps and shared memory of a block in execution.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "fiber.h"
#include "kernel.h"
#include "order.h"
#include "requests.h"
#include "shared_shadow.h"

namespace specdec::simt {

struct Block;
struct Warp;
class Executor;

// What a thread can wait for.
enum class Sync : int32_t { kNone, kBarrier, kWarpBarrier, kShuffle, kVote, kMmaTf32, kMmaBf16, kLoadMatrix };

struct AsyncCopy {
  int64_t target;      // offset in shared memory
  const void* source;  // null: zeros
  int32_t bytes;
  uint32_t place;
  int64_t group;
};

struct Thread {
  Fiber fiber;
  Block* block = nullptr;
  Warp* warp = nullptr;
  int index = 0, lane = 0;

  Sync sync = Sync::kNone;   // what it waits for
  int detail = 0;            // which barrier, how many matrices
  void* operands = nullptr;  // of a warp's operation
  uint32_t place = 0;        // where it waits

  std::vector<AccessRecord> records;
  std::vector<AsyncCopy> copies;  // issued, not landed, oldest first
  int64_t groups = 0;             // committed

  KnowledgePtr known;    // of other blocks
  KnowledgePtr learned;  // by atomics since the last fence
  KnowledgePtr fenced;   // what an atomic publishes

  uintptr_t flag = 0;  // what it acquired last: the same value again means that it spins
  int32_t flag_value = 0;
  int64_t calls = 0;  // since it was resumed
};

struct Warp {
  int index = 0;
  uint32_t ready = 0, polling = 0, waiting = 0, done = 0;  // lanes
  int at_operation = 0;                                    // lanes that wait for an operation of the warp
  uint32_t epoch = 0;
  std::vector<uint32_t> joined;  // see Accessor
  Thread* lanes[kWarpSize] = {};
};

struct Barrier {
  int expected = 0;
  std::vector<Thread*> arrived;
};

struct Block {
  static constexpr int kBarriers = 16;  // of which 0 is the block's

  Block(int threads, int64_t shared_bytes);

  Executor* executor = nullptr;
  cuda::Index3 index;
  int64_t number = 0;  // in the grid
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier barriers[kBarriers];
  int64_t shared_bytes;
  std::unique_ptr<char, void (*)(void*)> shared;
  SharedShadow shadow;
  uint32_t rotation = 0;        // which lane runs first
  std::vector<int> warp_order;  // which warp runs first
  int done = 0;                 // threads
  bool failed = false;          // cannot go on

  // A block of the grid moves in.
  void start(cuda::Index3 at, int64_t number, uint64_t seed);
  // Runs threads until none is ready.
  void run();
};

}  // namespace specdec::simt
