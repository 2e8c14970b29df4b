// The problems of recurrence_problem.h on the CUDA backend, through the executor, which must find nothing.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "../../csrc/cuda/ops.h"
#include "recurrence_problem.h"
#include "session.h"

namespace specdec::test {

inline size_t bytes_of(const Buffer& b) { return b.bytes(); }

// A session that knows the memory of `p`: NaN may be read nowhere, but it is bytes that count here.
class CudaProblem : public Problem {
 public:
  using Problem::Problem;

  // Registers what verify may read; factors of earlier calls and arrays of indices are added by their users.
  void register_inputs(simt::Session& session, Buffer& from, bool written) const {
    const auto add = [&](const char* name, const Tensor& t) {
      if (t.buffer.bytes() > 0) session.memory.add(name, t.buffer.data(), t.buffer.bytes(), simt::Direction::kInput);
    };
    add("q", q), add("k", k), add("v", v), add("g", g), add("beta", beta);
    session.memory.add("state", from.data(), from.bytes(),
                       written ? simt::Direction::kBoth : simt::Direction::kInput);
    session.memory.add("slots", slots.data(), slots.size(), simt::Direction::kInput);
  }

  static void register_factors(simt::Session& session, const char* name, const Outputs& o) {
    const std::string prefix = name;
    for (const auto& [part, buffer] : {std::pair{"k", &o.k}, {"u", &o.u}, {"g", &o.g}}) {
      if (buffer->bytes() > 0) {
        session.memory.add(prefix + "." + part, buffer->data(), buffer->bytes(), simt::Direction::kInput);
      }
    }
  }

  static void register_ints(simt::Session& session, const char* name, const int32_t* data, int64_t count) {
    if (data != nullptr && session.memory.find(reinterpret_cast<uintptr_t>(data)) == nullptr) {
      session.memory.add(name, data, static_cast<size_t>(count), simt::Direction::kInput);
    }
  }
};

}  // namespace specdec::test
