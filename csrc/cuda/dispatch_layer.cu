// Which instances of the fused layer exist, and which one a call takes.
#include "dispatch_tiles.cuh"
#include "ops.h"
#include "verify_layer.cuh"

namespace specdec::cuda {

namespace {

template <typename State, int kDK>
Status launch_tile(const LayerCall& call, Stream stream) {
  using Usual = VerifyLayer<Tile<false, State, kDK, kUsual>>;
  using Tall = VerifyLayer<Tile<false, State, kDK, kTall>>;
  const VerifyParams& v = call.layer.verify;
  if (tall_tiles(v.rec, v.B) && Tall::shape(call).shared_bytes <= kSharedLimit) {
    return launch<Tall>(call, stream);
  }
  if (Usual::shape(call).shared_bytes <= kSharedLimit) return launch<Usual>(call, stream);
  return Status::kUnsupported;
}

template <typename State>
Status launch_keys(const LayerCall& call, Stream stream) {
  switch (call.layer.verify.rec.DK) {
    case 64:
      return launch_tile<State, 64>(call, stream);
    case 128:
      return launch_tile<State, 128>(call, stream);
    case 256:
      return launch_tile<State, 256>(call, stream);
  }
  return Status::kUnsupported;
}

}  // namespace

VerifyWorkspace verify_layer_workspace(const VerifyLayerParams& p) {
  VerifyWorkspace wanted;
  wanted.counters_count = LayerCall{p, nullptr}.counters_count();
  return wanted;
}

Status verify_layer(const VerifyLayerParams& p, const VerifyWorkspace& workspace, Stream stream) {
  const Status layer = check_layer(p);
  if (layer != Status::kOk) return layer;
  const VerifyParams& v = p.verify;
  const Status state = check_state(v.rec, v.state, v.B);
  if (state != Status::kOk) return state;
  if (v.rec.gate == Gate::kChannel || v.N + (v.has_prefix ? v.prefix.nodes : 0) > kMaxSerialNodes) {
    return Status::kUnsupported;
  }
  if (p.has_prologue && p.prologue.W > kLayerTaps) return Status::kUnsupported;
  if (!p.has_prologue && (v.rec.gate == Gate::kNone) != (v.g == nullptr)) return Status::kInvalidArgument;
  if (!p.has_prologue && (v.rec.update == Update::kDelta) != (v.beta != nullptr))
    return Status::kInvalidArgument;
  const LayerCall call{p, workspace.counters};
  if (workspace.counters_count < call.counters_count()) return Status::kInvalidArgument;
  if (v.state.dtype == DType::kFloat32) return launch_keys<float>(call, stream);
  if (v.state.dtype == DType::kBFloat16) return launch_keys<bfloat16>(call, stream);
  return Status::kUnsupported;
}

}  // namespace specdec::cuda
