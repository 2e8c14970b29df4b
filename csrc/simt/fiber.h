// A thread of a block is a fiber: it runs until it waits, and goes on from there. Boost.Context switches in a
// few nanoseconds; ucontext, where Boost is not installed, needs a system call for each switch.
#pragma once

#include <cstddef>
#include <memory>

namespace specdec::simt {

// Memory for one fiber's stack, with a page below it that faults.
class Stack {
 public:
  Stack();
  ~Stack();
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  void* base() const { return base_; }  // lowest usable address
  static constexpr size_t kBytes = 256 * 1024;

 private:
  void* mapping_ = nullptr;
  void* base_ = nullptr;
};

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(Fiber&&) noexcept;
  Fiber& operator=(Fiber&&) noexcept;

  // Prepares entry(argument), which runs at the first resume. A fiber that has not finished is abandoned.
  void start(void (*entry)(void*), void* argument);
  // Runs the fiber until it yields or its entry returns. Called from outside of fibers.
  void resume();
  // Goes back to who resumed this fiber. Called inside.
  void yield();
  void abandon();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

const char* fiber_backend();  // "boost" or "ucontext"

}  // namespace specdec::simt
