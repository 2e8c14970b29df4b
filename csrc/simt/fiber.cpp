#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>
#include <utility>

#ifdef SPECDEC_SIMT_BOOST
#include <boost/context/fiber.hpp>
#else
#include <ucontext.h>
#endif

namespace specdec::simt {

Stack::Stack() {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  mapping_ = mmap(nullptr, kBytes + page, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (mapping_ == MAP_FAILED || mprotect(mapping_, page, PROT_NONE) != 0) throw std::bad_alloc();
  base_ = static_cast<char*>(mapping_) + page;
}

Stack::~Stack() { munmap(mapping_, kBytes + static_cast<size_t>(sysconf(_SC_PAGESIZE))); }

#ifdef SPECDEC_SIMT_BOOST

namespace {

// Boost wants an allocator; the stack belongs to the fiber and is used again.
struct KeptStack {
  void* base;
  boost::context::stack_context allocate() const {
    boost::context::stack_context context;
    context.size = Stack::kBytes;
    context.sp = static_cast<char*>(base) + Stack::kBytes;
    return context;
  }
  void deallocate(boost::context::stack_context&) const noexcept {}
};

}  // namespace

struct Fiber::State {
  Stack stack;
  boost::context::fiber inside, outside;
};

void Fiber::start(void (*entry)(void*), void* argument) {
  State* state = state_.get();
  state->inside = boost::context::fiber(std::allocator_arg, KeptStack{state->stack.base()},
                                        [state, entry, argument](boost::context::fiber&& outside) {
                                          state->outside = std::move(outside);
                                          entry(argument);
                                          return std::move(state->outside);
                                        });
}

void Fiber::resume() { state_->inside = std::move(state_->inside).resume(); }
void Fiber::yield() { state_->outside = std::move(state_->outside).resume(); }
void Fiber::abandon() { state_->inside = {}; }  // unwinds its stack

const char* fiber_backend() { return "boost"; }

#else

struct Fiber::State {
  Stack stack;
  ucontext_t inside, outside;
  void (*entry)(void*) = nullptr;
  void* argument = nullptr;

  // makecontext passes ints only.
  static void run(unsigned high, unsigned low) {
    auto* state = reinterpret_cast<State*>(static_cast<uintptr_t>(high) << 32 | low);
    state->entry(state->argument);
  }
};

void Fiber::start(void (*entry)(void*), void* argument) {
  State* state = state_.get();
  state->entry = entry;
  state->argument = argument;
  getcontext(&state->inside);
  state->inside.uc_stack.ss_sp = state->stack.base();
  state->inside.uc_stack.ss_size = Stack::kBytes;
  state->inside.uc_link = &state->outside;
  const auto address = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(state));
  makecontext(&state->inside, reinterpret_cast<void (*)()>(&State::run), 2,
              static_cast<unsigned>(address >> 32), static_cast<unsigned>(address & 0xffffffffu));
}

void Fiber::resume() { swapcontext(&state_->outside, &state_->inside); }
void Fiber::yield() { swapcontext(&state_->inside, &state_->outside); }
void Fiber::abandon() {}  // its stack holds registers of a kernel, nothing that wants a destructor

const char* fiber_backend() { return "ucontext"; }

#endif

Fiber::Fiber() : state_(std::make_unique<State>()) {}
Fiber::~Fiber() {
  if (state_) abandon();
}
Fiber::Fiber(Fiber&&) noexcept = default;
Fiber& Fiber::operator=(Fiber&&) noexcept = default;

}  // namespace specdec::simt
