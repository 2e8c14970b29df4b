#include "scratch.h"

#include <cstdlib>
#include <new>

namespace specdec::cpu {

namespace {

constexpr size_t kLine = kLineFloats * sizeof(float);

struct Buffer {
  float* data = nullptr;
  size_t count = 0;
  ~Buffer() { std::free(data); }
};

thread_local Buffer of_thread, of_call;

float* at_least(Buffer& buffer, size_t count) {
  if (count > buffer.count) {
    std::free(buffer.data);
    const size_t bytes = (count * sizeof(float) + kLine - 1) / kLine * kLine;
    buffer.data = static_cast<float*>(std::aligned_alloc(kLine, bytes));
    buffer.count = buffer.data != nullptr ? bytes / sizeof(float) : 0;
    if (buffer.data == nullptr) throw std::bad_alloc();
  }
  return buffer.data;
}

}  // namespace

float* thread_scratch(size_t count) { return at_least(of_thread, count); }
float* call_scratch(size_t count) { return at_least(of_call, count); }

}  // namespace specdec::cpu
