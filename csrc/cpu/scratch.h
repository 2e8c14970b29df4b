// Working memory of a thread: allocated at the first call that needs it, kept and reused.
#pragma once

#include <cstddef>
#include <cstdint>

namespace specdec::cpu {

constexpr int64_t kLineFloats = 16;  // of a cache line

// At least `count` floats, aligned to a cache line, contents undefined; valid until this thread's next call.
float* thread_scratch(size_t count);

// The same, apart from it: what the threads of a call share. The calling thread asks for it.
float* call_scratch(size_t count);

}  // namespace specdec::cpu
