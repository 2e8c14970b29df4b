// What the primitives of a kernel call: every function is about the thread that runs.
#pragma once

#include <cstdint>

#include "kernel.h"
#include "where.h"

namespace specdec::simt {

class Buffer;

// Shared memory that a kernel took: offsets from the block's first byte.
struct SharedRange {
  int64_t begin = 0, end = 0;
};

int thread_index();
cuda::Index3 block_index();
cuda::Index3 grid_size();

Buffer* find_buffer(const void* pointer);

// Whether the access may be done; findings are reported. `bytes` is 1, 2, 4, 8 or 16.
bool read_global(const Buffer* buffer, const void* address, int bytes, Where where);
bool write_global(Buffer* buffer, void* address, int bytes, Where where);
// As above for flags and counters; an acquire of a value that has not changed lets other threads run.
bool acquire_global(const Buffer* buffer, const int32_t* address, Where where);
bool release_global(Buffer* buffer, void* address, bool atomic, Where where);

// `offset` elements of `bytes` each lie behind range.begin + at.
SharedRange take_shared(int64_t used, int64_t bytes, Where where);
// The place of an access, or null.
void* read_shared(SharedRange range, int64_t offset, int bytes, Where where);
void* write_shared(SharedRange range, int64_t offset, int bytes, Where where);

void copy_async(SharedRange range, int64_t offset, const Buffer* buffer, const void* source, int bytes,
                bool valid, Where where);
void copy_async_commit();
void copy_async_wait(int64_t groups_left);

void barrier(int id, int threads, Where where);
void block_barrier(Where where);
void warp_barrier(Where where);
void fence();

// Operations of a warp: all lanes give their operands and get their results.
uint32_t shuffle(uint32_t value, int source_lane, Where where);
uint32_t ballot(bool predicate, Where where);
void mma_tf32(float* d, const float* a, const float* b, Where where);
void mma_bf16(float* d, const uint32_t* a, const uint32_t* b, Where where);
void load_matrix(uint32_t* registers, int matrices, bool transposed, SharedRange range, int64_t offset,
                 Where where);

}  // namespace specdec::simt
