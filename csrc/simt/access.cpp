#include "access.h"

#include <cstring>
#include <string>

#include "executor.h"

namespace specdec::simt {

namespace {

// Between two waits; a kernel at test sizes stays far below.
constexpr int64_t kMostCalls = 4'000'000;

Executor& begin_call(Where where, uint32_t& place) {
  Thread& thread = *current;
  Executor& executor = *thread.block->executor;
  place = executor.session.places.number(where);
  ++executor.session.report.primitive_calls;
  if (++thread.calls > kMostCalls) {
    executor.find(FindingKind::kDeadlock, thread, place, "makes millions of calls without a wait");
    thread.block->failed = true;
    executor.poll();
  }
  return executor;
}

std::string bytes_at(const char* verb, int bytes, int64_t offset) {
  return std::string(verb) + " " + std::to_string(bytes) + " bytes at byte " + std::to_string(offset);
}

bool check_global(Executor& executor, const char* verb, const Buffer* buffer, const void* pointer, int bytes,
                  uint32_t place) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (buffer == nullptr) {
    executor.find(
        FindingKind::kOutOfBounds, *current, place,
        std::string(verb) + " through a pointer " + (address < 4096 ? "that is null" : "to no known buffer"));
    return false;
  }
  const auto offset = static_cast<int64_t>(address - buffer->begin());
  if (!buffer->contains(address, static_cast<size_t>(bytes))) {
    executor.find(FindingKind::kOutOfBounds, *current, place,
                  bytes_at(verb, bytes, offset) + " of " + buffer->name() + ", which has " +
                      std::to_string(buffer->end() - buffer->begin()));
    return false;
  }
  if (address % static_cast<uintptr_t>(bytes) != 0) {
    executor.find(FindingKind::kMisaligned, *current, place,
                  bytes_at(verb, bytes, offset) + " of " + buffer->name());
    return false;
  }
  return true;
}

void check_values(Executor& executor, const Buffer& buffer, const void* pointer, int bytes, uint32_t place) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (buffer.holds_values(address, static_cast<size_t>(bytes))) return;
  executor.find(FindingKind::kUninitialized, *current, place,
                bytes_at("reads", bytes, static_cast<int64_t>(address - buffer.begin())) + " of " +
                    buffer.name() + ", where nobody wrote");
}

bool check_writable(Executor& executor, const Buffer& buffer, uint32_t place) {
  if (buffer.direction() != Direction::kInput) return true;
  executor.find(FindingKind::kReadOnly, *current, place, "writes to " + buffer.name() + ", an input");
  return false;
}

Accessor accessor() {
  const Thread& thread = *current;
  return {thread.index, thread.warp->epoch, thread.warp->joined.data()};
}

void check_order(Executor& executor, const Buffer& buffer, const void* pointer, int bytes, bool write,
                 uint32_t place) {
  if (buffer.direction() == Direction::kInput) return;
  const GlobalAccessor by{executor.launch, current->block->number, accessor(), &current->known};
  const size_t offset = reinterpret_cast<uintptr_t>(pointer) - buffer.begin(),
               size = buffer.end() - buffer.begin();
  const GlobalConflict other = write ? buffer.shadow.write(offset, bytes, size, by, place)
                                     : buffer.shadow.read(offset, bytes, size, by, place);
  if (other.thread < 0) return;
  executor.find(FindingKind::kRace, *current, place,
                std::string(write ? "writes " : "reads ") + buffer.name() + " where a thread of " +
                    (other.same_block ? "this" : "another") + " block " + (other.write ? "writes" : "reads") +
                    ", with no " + (other.same_block ? "barrier" : "flag") + " between",
                other);
}

bool check_shared(Executor& executor, const char* verb, SharedRange range, int64_t offset, int bytes,
                  uint32_t place) {
  if (offset < range.begin || offset + bytes > range.end) {
    executor.find(FindingKind::kOutOfBounds, *current, place,
                  bytes_at(verb, bytes, offset - range.begin) + " of an array in shared memory that has " +
                      std::to_string(range.end - range.begin));
    return false;
  }
  if (offset % bytes != 0) {
    executor.find(FindingKind::kMisaligned, *current, place,
                  bytes_at(verb, bytes, offset) + " of shared memory");
    return false;
  }
  return true;
}

void check_touch(Executor& executor, const char* verb, const SharedShadow::Touch& touch, SharedRange range,
                 int64_t offset, int bytes, uint32_t place) {
  if (touch.pending) {
    executor.find(FindingKind::kAsyncNotWaited, *current, place,
                  bytes_at(verb, bytes, offset - range.begin) +
                      " of an array in shared memory while an asynchronous copy writes there");
  }
  if (touch.conflict.thread >= 0) {
    executor.find(FindingKind::kRace, *current, place,
                  std::string(verb) + " shared memory that another thread " +
                      (touch.conflict.write ? "writes" : "reads") + ", with no barrier between",
                  touch.conflict);
  }
}

}  // namespace

int thread_index() { return current->index; }
cuda::Index3 block_index() { return current->block->index; }
cuda::Index3 grid_size() { return current->block->executor->grid; }

Buffer* find_buffer(const void* pointer) {
  if (pointer == nullptr || current == nullptr) return nullptr;
  return current->block->executor->session.memory.find(reinterpret_cast<uintptr_t>(pointer));
}

// --- global memory ---

bool read_global(const Buffer* buffer, const void* address, int bytes, Where where) {
  uint32_t place;
  Executor& executor = begin_call(where, place);
  if (!check_global(executor, "reads", buffer, address, bytes, place)) return false;
  check_values(executor, *buffer, address, bytes, place);
  check_order(executor, *buffer, address, bytes, false, place);
  executor.access(Access::kGlobalRead, reinterpret_cast<uintptr_t>(address), bytes, place);
  return true;
}

bool write_global(Buffer* buffer, void* address, int bytes, Where where) {
  uint32_t place;
  Executor& executor = begin_call(where, place);
  if (!check_global(executor, "writes", buffer, address, bytes, place)) return false;
  if (!check_writable(executor, *buffer, place)) return false;
  check_order(executor, *buffer, address, bytes, true, place);
  buffer->set_values(reinterpret_cast<uintptr_t>(address), static_cast<size_t>(bytes));
  executor.access(Access::kGlobalWrite, reinterpret_cast<uintptr_t>(address), bytes, place);
  executor.progress();
  return true;
}

bool acquire_global(const Buffer* buffer, const int32_t* address, Where where) {
  uint32_t place;
  Executor& executor = begin_call(where, place);
  if (!check_global(executor, "acquires", buffer, address, sizeof(int32_t), place)) return false;
  check_values(executor, *buffer, address, sizeof(int32_t), place);
  ++executor.counts.flag_accesses;
  Thread& thread = *current;
  if (thread.flag == reinterpret_cast<uintptr_t>(address) && thread.flag_value == *address) {
    thread.place = place;
    executor.poll();
  }
  executor.acquire(reinterpret_cast<uintptr_t>(address));
  thread.flag = reinterpret_cast<uintptr_t>(address);
  thread.flag_value = *address;
  return true;
}

bool release_global(Buffer* buffer, void* address, bool atomic, Where where) {
  uint32_t place;
  Executor& executor = begin_call(where, place);
  if (!check_global(executor, "updates", buffer, address, sizeof(int32_t), place)) return false;
  if (!check_writable(executor, *buffer, place)) return false;
  buffer->set_values(reinterpret_cast<uintptr_t>(address), sizeof(int32_t));
  if (atomic) {
    executor.update(reinterpret_cast<uintptr_t>(address));
  } else {
    executor.release(reinterpret_cast<uintptr_t>(address));
  }
  ++executor.counts.flag_accesses;
  executor.progress();
  return true;
}

// --- shared memory ---

SharedRange take_shared(int64_t used, int64_t bytes, Where where) {
  uint32_t place;
  Executor& executor = begin_call(where, place);
  const int64_t begin = (used + 15) / 16 * 16;
  if (bytes < 0 || begin + bytes > executor.shared_bytes) {
    executor.find(FindingKind::kOutOfBounds, *current, place,
                  "takes shared memory up to byte " + std::to_string(begin + bytes) + " of " +
                      std::to_string(executor.shared_bytes));
    return {begin, begin};
  }
  return {begin, begin + bytes};
}

void* read_shared(SharedRange range, int64_t offset, int bytes, Where where) {
  uint32_t place;
  Executor& executor = begin_call(where, place);
  if (!check_shared(executor, "reads", range, offset, bytes, place)) return nullptr;
  Block& block = *current->block;
  const SharedShadow::Touch touch = block.shadow.read(offset, bytes, accessor(), place);
  if (touch.unwritten && !touch.pending) {
    executor.find(
        FindingKind::kUninitialized, *current, place,
        bytes_at("reads", bytes, offset - range.begin) + " of an array in shared memory, where nobody wrote");
  }
  check_touch(executor, "reads", touch, range, offset, bytes, place);
  executor.access(Access::kSharedRead, static_cast<uint64_t>(offset), bytes, place);
  return block.shared.get() + offset;
}

void* write_shared(SharedRange range, int64_t offset, int bytes, Where where) {
  uint32_t place;
  Executor& executor = begin_call(where, place);
  if (!check_shared(executor, "writes", range, offset, bytes, place)) return nullptr;
  Block& block = *current->block;
  check_touch(executor, "writes", block.shadow.write(offset, bytes, accessor(), place), range, offset, bytes,
              place);
  block.shadow.set_values(offset, bytes);
  executor.access(Access::kSharedWrite, static_cast<uint64_t>(offset), bytes, place);
  return block.shared.get() + offset;
}

// --- asynchronous copies ---

void copy_async(SharedRange range, int64_t offset, const Buffer* buffer, const void* source, int bytes,
                bool valid, Where where) {
  uint32_t place;
  Executor& executor = begin_call(where, place);
  if (valid) {
    if (!check_global(executor, "copies", buffer, source, bytes, place)) return;
    check_values(executor, *buffer, source, bytes, place);
    check_order(executor, *buffer, source, bytes, false, place);
    executor.access(Access::kGlobalRead, reinterpret_cast<uintptr_t>(source), bytes, place);
    executor.counts.async_bytes += bytes;
  }
  if (!check_shared(executor, "copies to", range, offset, bytes, place)) return;
  Thread& thread = *current;
  SharedShadow& shadow = thread.block->shadow;
  check_touch(executor, "copies to", shadow.write(offset, bytes, accessor(), place), range, offset, bytes,
              place);
  shadow.add_pending(offset, bytes, 1);
  executor.access(Access::kSharedWrite, static_cast<uint64_t>(offset), bytes, place);
  thread.copies.push_back({offset, valid ? source : nullptr, bytes, place, thread.groups});
}

void copy_async_commit() { ++current->groups; }

void copy_async_wait(int64_t groups_left) {
  Thread& thread = *current;
  Block& block = *thread.block;
  size_t landed = 0;
  for (; landed < thread.copies.size(); ++landed) {
    const AsyncCopy& copy = thread.copies[landed];
    if (copy.group >= thread.groups - groups_left) break;
    char* target = block.shared.get() + copy.target;
    if (copy.source != nullptr) {
      std::memcpy(target, copy.source, static_cast<size_t>(copy.bytes));
    } else {
      std::memset(target, 0, static_cast<size_t>(copy.bytes));
    }
    block.shadow.add_pending(copy.target, copy.bytes, -1);
    block.shadow.set_values(copy.target, copy.bytes);
    // Whoever came between read or wrote under the copy, which was reported.
    block.shadow.write(copy.target, copy.bytes, accessor(), copy.place);
  }
  thread.copies.erase(thread.copies.begin(), thread.copies.begin() + static_cast<int64_t>(landed));
}

// --- waits ---

void fence() { current->block->executor->fence(); }

void barrier(int id, int threads, Where where) {
  uint32_t place;
  Executor& executor = begin_call(where, place);
  if (id < 1 || id >= Block::kBarriers || threads < kWarpSize || threads % kWarpSize != 0 ||
      threads > executor.threads) {
    executor.find(FindingKind::kBarrier, *current, place,
                  "barrier " + std::to_string(id) + " for " + std::to_string(threads) +
                      " threads: want 1 to 15, and whole warps of the block");
    return;
  }
  executor.wait_at_barrier(id, threads, place);
}

void block_barrier(Where where) {
  uint32_t place;
  Executor& executor = begin_call(where, place);
  executor.wait_at_barrier(0, executor.threads, place);
}

void warp_barrier(Where where) {
  uint32_t place;
  Executor& executor = begin_call(where, place);
  executor.wait_for_warp(Sync::kWarpBarrier, 0, nullptr, place);
}

}  // namespace specdec::simt
