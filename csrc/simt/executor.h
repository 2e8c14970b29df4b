// One launch: the blocks of a grid, those in execution, and what the primitives call.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "block.h"
#include "memory.h"
#include "report.h"
#include "requests.h"
#include "session.h"

namespace specdec::simt {

class Executor {
 public:
  Executor(Session& session, KernelCounts& counts, cuda::Index3 grid, int threads, int64_t shared_bytes,
           uint32_t launch, void (*body)(const void*), const void* params);

  void run();

  // --- for the primitives, about the thread that runs ---
  void access(Access kind, uint64_t address, int bytes, uint32_t place);
  void find(FindingKind kind, const Thread& thread, uint32_t place, std::string text,
            const Conflict& other = {});
  // Waits until the other lanes of the warp, or the threads of the barrier, have arrived.
  void wait_for_warp(Sync sync, int detail, void* operands, uint32_t place);
  void wait_at_barrier(int id, int threads, uint32_t place);
  void poll();  // lets other threads run

  void progress() { ++progress_; }

  // What flags carry between blocks.
  void acquire(uintptr_t flag);
  void release(uintptr_t flag);
  void update(uintptr_t flag);  // an atomic
  void fence();

  Session& session;
  KernelCounts& counts;
  RequestCounter requests;
  const cuda::Index3 grid;
  const int threads;
  const int64_t shared_bytes;
  const uint32_t launch;

 private:
  friend struct Block;
  static void thread_main(void* thread);
  void finish(Thread& thread);
  void suspend(Thread& thread, uint32_t Warp::* list);
  void arrive(Thread& thread);
  KnowledgePtr knowledge_of(const Thread& thread) const;
  void release_barrier(Block& block, Barrier& barrier);
  void report_stuck(Block& block);
  void report_polling(Block& block, int64_t started, int64_t total);
  void abandon(Block& block);
  void summarize();

  void (*body_)(const void*);
  const void* params_;
  std::vector<std::unique_ptr<Block>> active_, spare_;
  std::map<uintptr_t, KnowledgePtr> flags_;
  int64_t progress_ = 0;  // moves with everything that a polling thread might wait for
};

extern Thread* current;  // the thread that runs; null outside of kernels

// Executes an operation whose lanes have all arrived.
void execute_operation(Warp& warp);

}  // namespace specdec::simt
