// Turns tensors into parameter structs. Checks here are the ones that protect memory; they name the argument,
// what was given and what is wanted. The Python wrappers raise them as ValueError.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "specdec/params.h"

namespace specdec::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline std::string shape_string(const Tensor& t) {
  std::string s = "[";
  for (int64_t i = 0; i < t.dim(); ++i) s += (i ? ", " : "") + std::to_string(t.size(i));
  return s + "]";
}

inline void check_given(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.defined(), name, ": got None, want a tensor");
}

// -1 in `want` accepts any size.
inline void check_shape(const Tensor& t, const char* name, std::initializer_list<int64_t> want,
                        const char* dims) {
  check_given(t, name);
  bool ok = t.dim() == static_cast<int64_t>(want.size());
  int64_t i = 0;
  for (int64_t size : want) {
    if (!ok) break;
    ok = size < 0 || t.size(i) == size;
    ++i;
  }
  if (ok) return;
  std::string sizes;
  for (int64_t size : want)
    sizes += (sizes.empty() ? "" : ", ") + (size < 0 ? std::string("any") : std::to_string(size));
  STD_TORCH_CHECK(false, name, ": got shape ", shape_string(t), ", want ", dims, " = [", sizes, "]");
}

inline DType float_dtype(const Tensor& t, const char* name) {
  check_given(t, name);
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      STD_TORCH_CHECK(false, name, ": got dtype ", torch::headeronly::toString(t.scalar_type()),
                      ", want float32, bfloat16 or float16");
  }
}

inline void check_dtype(const Tensor& t, const char* name, ScalarType want) {
  check_given(t, name);
  STD_TORCH_CHECK(t.scalar_type() == want, name, ": got dtype ", torch::headeronly::toString(t.scalar_type()),
                  ", want ", torch::headeronly::toString(want));
}

inline void check_last_contiguous(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.dim() == 0 || t.size(t.dim() - 1) <= 1 || t.stride(t.dim() - 1) == 1, name,
                  ": the last dimension has stride ", t.stride(t.dim() - 1), ", want 1 (call .contiguous())");
}

inline void check_contiguous(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_contiguous(), name,
                  ": got a non-contiguous tensor, want contiguous (call .contiguous())");
}

// The data of an argument that is there. Null means absent in a parameter struct, but an empty tensor's data
// may be null too.
template <typename T>
inline const T* present(const Tensor& t) {
  static const T none{};
  const void* data = t.const_data_ptr();
  return data != nullptr ? static_cast<const T*>(data) : &none;
}

inline const float* float_vector(const Tensor& t, const char* name, int64_t size, const char* dims) {
  check_dtype(t, name, ScalarType::Float);
  check_shape(t, name, {size}, dims);
  check_contiguous(t, name);
  return static_cast<const float*>(t.const_data_ptr());
}

// An optional contiguous int32 tensor of the given shape; null where absent.
inline const int32_t* int32_or_null(const OptionalTensor& t, const char* name,
                                    std::initializer_list<int64_t> want, const char* dims) {
  if (!t.has_value()) return nullptr;
  check_dtype(*t, name, ScalarType::Int);
  check_shape(*t, name, want, dims);
  check_contiguous(*t, name);
  return present<int32_t>(*t);
}

constexpr int64_t kMaxDims = 64;  // of a tensor that a new one takes its shape from

struct Device {
  int32_t type = aoti_torch_device_type_cpu();
  int32_t index = 0;
};

// A fresh contiguous tensor. The C call beneath stable::empty, which goes through the dispatcher and costs
// several times as much: `verify` makes four outputs a call.
inline Tensor new_contiguous(const Device& device, const int64_t* sizes, int64_t dim, int32_t aoti_dtype) {
  int64_t strides[kMaxDims];
  int64_t stride = 1;
  for (int64_t d = dim; d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(dim, sizes, strides, aoti_dtype, device.type, device.index, &handle));
  return Tensor(handle);
}

inline Tensor new_contiguous(const Device& device, std::initializer_list<int64_t> sizes, int32_t aoti_dtype) {
  return new_contiguous(device, sizes.begin(), static_cast<int64_t>(sizes.size()), aoti_dtype);
}

inline int32_t aoti_dtype(const Tensor& t) {
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  return dtype;
}

inline void check_status(Status status, const char* op) {
  switch (status) {
    case Status::kOk:
      return;
    case Status::kUnsupported:
      STD_TORCH_CHECK(false, op, ": this backend has no kernel for these sizes, types and strides");
    case Status::kInvalidArgument:
      STD_TORCH_CHECK(false, op, ": parameters that contradict each other");
    case Status::kLaunchFailed:
      STD_TORCH_CHECK(false, op, ": the device refused the launch");
  }
}

}  // namespace specdec::binding
