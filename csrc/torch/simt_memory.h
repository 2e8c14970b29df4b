// Tells the executor which memory a call may touch: the elements of its tensors and its workspaces, nothing
// beside or between them.
#pragma once

#include <deque>
#include <string>

#include "memory.h"
#include "operands.h"

namespace specdec::binding {

// A workspace.
struct Scratch {
  const char* name;
  void* data;
  size_t bytes;
  simt::Direction direction;
};

// Tensors that interleave, such as slices of one wider projection, are one buffer of the executor, whose
// bytes between their elements hold no values.
class CallMemory {
 public:
  CallMemory(simt::Memory& memory, const Operands& operands, NamedTensors outputs,
             std::initializer_list<Scratch> scratch);

  // Outputs that were not filled and writes between the elements of tensors, in words; empty where all is
  // well.
  std::string written_wrongly() const;

 private:
  struct Buffer {
    simt::Buffer* buffer;
    int64_t values;  // bytes that hold one after the call
  };

  void add(simt::Memory& memory, const Named* first, const Named* last, simt::Direction direction);

  std::deque<Buffer> buffers_;
};

}  // namespace specdec::binding
