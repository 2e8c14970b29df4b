// The tensors of a call by the names of their arguments: for checks over all of them, and for a backend that
// looks at memory.
#pragma once

#include "tensor_args.h"

namespace specdec::binding {

// An argument and its name; null where it is absent.
struct Named {
  Named() = default;
  Named(const char* name, const Tensor& tensor) : name(name), tensor(tensor.defined() ? &tensor : nullptr) {}
  Named(const char* name, const OptionalTensor& tensor)
      : name(name), tensor(tensor.has_value() && tensor->defined() ? &*tensor : nullptr) {}

  const char* name = "";
  const Tensor* tensor = nullptr;
};

// An array that outlives the call.
struct NamedTensors {
  template <size_t kCount>
  NamedTensors(const Named (&tensors)[kCount]) : first(tensors), count(kCount) {}
  NamedTensors(const std::vector<Named>& tensors) : first(tensors.data()), count(tensors.size()) {}

  const Named* begin() const { return first; }
  const Named* end() const { return first + count; }

  const Named* first;
  size_t count;
};

enum class Access { kRead, kWrite };

// The pools (state, conv_state; of sampling the logits or probabilities), the first of which is always there,
// what happens to them, and everything that is only read.
struct Operands {
  Named pools[2];
  Access access;
  NamedTensors inputs;
};

}  // namespace specdec::binding
