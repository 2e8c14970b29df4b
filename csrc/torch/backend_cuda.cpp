// The CUDA kernels as a backend. Everything goes to torch's current stream; nothing waits for it.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>

#include <map>
#include <mutex>
#include <utility>

#include "../cuda/ops.h"
#include "backend.h"
#include "cuda_layer.h"

namespace specdec::binding {

namespace {

std::string name_of(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  return (t.is_cuda() ? "cuda:" : "device ") + std::to_string(t.get_device_index());
}

// Makes the device of the operands the current one, as a launch wants it, and finds its stream.
class Place {
 public:
  explicit Place(const Operands& operands)
      : device_{aoti_torch_device_type_cuda(), operands.pools[0].tensor->get_device_index()},
        guard_(device_.index) {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_.index, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  const Device& device() const { return device_; }
  cudaStream_t stream() const { return stream_; }

 private:
  Device device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

Tensor zeros(const Place& place, int64_t count) {
  Tensor t = new_contiguous(place.device(), {count}, aoti_torch_dtype_int32());
  STD_TORCH_CHECK(cudaMemsetAsync(t.mutable_data_ptr(), 0, static_cast<size_t>(count) * sizeof(int32_t),
                                  place.stream()) == cudaSuccess,
                  "the device refused to clear a workspace");
  return t;
}

// Zeroed counters of a stream: a call leaves them zero, so calls that follow each other share them. Calls of
// a graph that is being captured get their own, cleared within the graph: nobody knows what its replays run
// beside.
Tensor counters(const Place& place, int64_t count) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(place.stream(), &capture) != cudaSuccess ||
      capture != cudaStreamCaptureStatusNone) {
    return zeros(place, count);
  }
  // Never destroyed: when a process ends, torch's allocator may be gone before this.
  static auto& kept = *new std::map<std::pair<int32_t, cudaStream_t>, Tensor>();
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto key = std::make_pair(place.device().index, place.stream());
  const auto found = kept.find(key);
  if (found != kept.end() && found->second.numel() >= count) return found->second;
  Tensor fresh = zeros(place, count);
  kept.insert_or_assign(key, fresh);
  return fresh;
}

// What a verification wants; freed in the order of the stream.
class Workspace {
 public:
  Workspace(const Place& place, const cuda::VerifyWorkspace& wanted) : space_(wanted) {
    if (wanted.states_count > 0) {
      states_ = new_contiguous(place.device(), {wanted.states_count}, aoti_torch_dtype_float32());
      space_.states = static_cast<float*>(states_->mutable_data_ptr());
    }
    if (wanted.counters_count > 0) {
      counters_ = counters(place, wanted.counters_count);
      space_.counters = static_cast<int32_t*>(counters_->mutable_data_ptr());
    }
  }

  const cuda::VerifyWorkspace& space() const { return space_; }

 private:
  cuda::VerifyWorkspace space_;
  OptionalTensor states_, counters_;
};

// What blocks that work on a row together want, and the launch.
template <typename F>
Status run_teams(const Place& place, cuda::TeamWorkspace space, const F& launch) {
  OptionalTensor values, zeroed;
  if (space.values_count > 0) {
    values = new_contiguous(place.device(), {space.values_count}, aoti_torch_dtype_int64());
    space.values = static_cast<uint64_t*>(values->mutable_data_ptr());
  }
  if (space.counters_count > 0) {
    zeroed = counters(place, space.counters_count);
    space.counters = static_cast<int32_t*>(zeroed->mutable_data_ptr());
  }
  return launch(space);
}

}  // namespace

bool values_on_host() { return false; }

bool on_tensor_cores() { return true; }

Device device_of(const Operands& operands) {
  const Named& first = operands.pools[0];
  STD_TORCH_CHECK(first.tensor != nullptr, first.name, ": got None, want a tensor");
  const Tensor& pool = *first.tensor;
  STD_TORCH_CHECK(pool.is_cuda(), first.name, ": got a tensor on ", name_of(pool), ", want cuda");
  const auto check = [&](const Named& other) {
    if (other.tensor == nullptr) return;
    const Tensor& t = *other.tensor;
    STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == pool.get_device_index(), other.name,
                    ": got a tensor on ", name_of(t), ", want ", name_of(pool), " as ", first.name);
  };
  for (const Named& input : operands.inputs) check(input);
  check(operands.pools[1]);
  return {aoti_torch_device_type_cuda(), pool.get_device_index()};
}

Status run(const VerifyParams& p, const Operands& operands, NamedTensors) {
  const Place place(operands);
  const Workspace workspace(place, cuda::verify_workspace(p));
  return cuda::verify(p, workspace.space(), place.stream());
}

Status run(const VerifyLayerParams& p, const Operands& operands, NamedTensors) {
  check_layer_kernel(p);
  const Place place(operands);
  const Workspace workspace(place, cuda::verify_layer_workspace(p));
  return cuda::verify_layer(p, workspace.space(), place.stream());
}

Status run(const CommitParams& p, const Operands& operands) {
  const Place place(operands);
  return cuda::commit(p, place.stream());
}

Status run(const PrefillParams& p, const Operands& operands, NamedTensors) {
  const Place place(operands);
  return cuda::prefill(p, place.stream());
}

Status run(const ConvVerifyParams& p, const Operands& operands, NamedTensors) {
  const Place place(operands);
  return cuda::conv_verify(p, place.stream());
}

Status run(const ConvCommitParams& p, const Operands& operands) {
  const Place place(operands);
  return cuda::conv_commit(p, place.stream());
}

Status run(const AcceptGreedyParams& p, const Operands& operands, NamedTensors) {
  const Place place(operands);
  const int64_t bytes = cuda::accept_greedy_workspace_bytes(p);
  if (bytes == 0) return cuda::accept_greedy(p, {}, place.stream());
  Tensor space = new_contiguous(place.device(), {bytes / 8}, aoti_torch_dtype_int64());
  return cuda::accept_greedy(p, {space.mutable_data_ptr(), bytes}, place.stream());
}

Status run(const TreeAttentionParams& p, const Operands& operands, NamedTensors) {
  const Place place(operands);
  const int64_t bytes = cuda::tree_attention_workspace_bytes(p);
  if (bytes == 0) return cuda::tree_attention(p, {}, place.stream());
  Tensor space = new_contiguous(place.device(), {bytes / 8}, aoti_torch_dtype_int64());
  return cuda::tree_attention(p, {space.mutable_data_ptr(), bytes}, place.stream());
}

Status run(const AcceptSampledParams& p, const Operands& operands, NamedTensors) {
  const Place place(operands);
  return run_teams(place, cuda::accept_sampled_workspace(p), [&](const cuda::TeamWorkspace& space) {
    return cuda::accept_sampled(p, space, place.stream());
  });
}

Status run(const SamplingProbsParams& p, const Operands& operands, NamedTensors) {
  const Place place(operands);
  return run_teams(place, cuda::sampling_probs_workspace(p), [&](const cuda::TeamWorkspace& space) {
    return cuda::sampling_probs(p, space, place.stream());
  });
}

Status run(const DrawParams& p, const Operands& operands, NamedTensors) {
  const Place place(operands);
  return run_teams(place, cuda::draw_tokens_workspace(p), [&](const cuda::TeamWorkspace& space) {
    return cuda::draw_tokens(p, space, place.stream());
  });
}

}  // namespace specdec::binding
