// Chooses the instance of a kernel from the parameters: the only place that knows which exist.
#include "commit.cuh"
#include "dispatch_tiles.cuh"
#include "ops.h"
#include "verify_hybrid.cuh"
#include "verify_serial.cuh"

namespace specdec::cuda {

namespace {

template <typename State, int kDK, typename F>
Status visit_gate(Gate gate, F&& f) {
  return gate == Gate::kChannel ? f(Tag<Tile<true, State, kDK, kUsual>>{})
                                : f(Tag<Tile<false, State, kDK, kUsual>>{});
}

template <typename State, typename F>
Status visit_keys(const Recurrence& rec, F&& f) {
  switch (rec.DK) {
    case 32:
      return visit_gate<State, 32>(rec.gate, f);
    case 64:
      return visit_gate<State, 64>(rec.gate, f);
    case 96:
      return visit_gate<State, 96>(rec.gate, f);
    case 128:
      return visit_gate<State, 128>(rec.gate, f);
    case 192:
      return visit_gate<State, 192>(rec.gate, f);
    case 256:
      return visit_gate<State, 256>(rec.gate, f);
  }
  return Status::kUnsupported;
}

// f(Tag<traits of the usual tile>).
template <typename F>
Status visit_traits(const Recurrence& rec, DType state, F&& f) {
  if (state == DType::kFloat32) return visit_keys<float>(rec, f);
  if (state == DType::kBFloat16) return visit_keys<bfloat16>(rec, f);
  return Status::kUnsupported;
}

// Starts Kernel<traits> with the tallest tile that fits and leaves enough blocks.
template <template <typename> class Kernel, typename Params>
Status launch_tiles(const Params& p, Stream stream) {
  return visit_traits(p.rec, p.state.dtype, [&](auto tag) {
    using Usual = typename decltype(tag)::Type;
    if constexpr (has_tall(Usual::kChannelGate, Usual::kDK)) {
      using Tall = WithRows<Usual, kTall>;
      if (tall_tiles(p.rec, p.B) && Kernel<Tall>::shape(p).shared_bytes <= kSharedLimit)
        return launch<Kernel<Tall>>(p, stream);
    }
    if (Kernel<Usual>::shape(p).shared_bytes <= kSharedLimit) return launch<Kernel<Usual>>(p, stream);
    if constexpr (has_narrow(Usual::kDK)) {
      using Narrow = WithRows<Usual, kNarrow>;
      if (Kernel<Narrow>::shape(p).shared_bytes <= kSharedLimit) return launch<Kernel<Narrow>>(p, stream);
    }
    return Status::kUnsupported;
  });
}

// A chain is the same launch either way.
bool is_hybrid(const VerifyParams& p) { return p.strategy == Strategy::kHybrid && TreeWalk::wanted(p); }

}  // namespace

VerifyWorkspace verify_workspace(const VerifyParams& p) {
  VerifyWorkspace wanted;
  if (!is_hybrid(p) || p.rec.DV % kUsual != 0) return wanted;
  visit_traits(p.rec, p.state.dtype, [&](auto tag) {
    using Kernel = VerifyHybrid<typename decltype(tag)::Type>;
    wanted.states_count = Kernel::states_count(p);
    wanted.counters_count = Kernel::counters_count(p);
    return Status::kOk;
  });
  return wanted;
}

Status verify(const VerifyParams& p, const VerifyWorkspace& workspace, Stream stream) {
  if ((p.rec.gate == Gate::kNone) != (p.g == nullptr)) return Status::kInvalidArgument;
  if ((p.rec.update == Update::kDelta) != (p.beta != nullptr)) return Status::kInvalidArgument;
  // A prefix hangs below the durable state; pending factors would move that state away under it.
  if (p.has_pending && p.has_prefix) return Status::kInvalidArgument;
  const Status checked = check_state(p.rec, p.state, p.B);
  if (checked != Status::kOk) return checked;
  if (p.strategy == Strategy::kSolve) return verify_solve(p, stream);
  if (p.precision != Precision::kIeee) return Status::kUnsupported;
  if (p.N + (p.has_prefix ? p.prefix.nodes : 0) > kMaxSerialNodes) return Status::kUnsupported;
  if (!is_hybrid(p)) return launch_tiles<VerifySerial>(p, stream);
  const VerifyWorkspace wanted = verify_workspace(p);
  if (workspace.states_count < wanted.states_count || workspace.counters_count < wanted.counters_count) {
    return Status::kInvalidArgument;
  }
  return visit_traits(p.rec, p.state.dtype, [&](auto tag) {
    using Kernel = VerifyHybrid<typename decltype(tag)::Type>;
    if (Kernel::blocks_wanted(p) > kMaxBlocks) return Status::kUnsupported;
    return launch<Kernel>(HybridParams{p, workspace.states, workspace.counters}, stream);
  });
}

Status commit(const CommitParams& p, Stream stream) {
  if ((p.rec.gate == Gate::kNone) != (p.factors.g == nullptr)) return Status::kInvalidArgument;
  const Status checked = check_state(p.rec, p.state, p.B);
  if (checked != Status::kOk) return checked;
  if (p.path.max_length == 0) return Status::kOk;
  return launch_tiles<Commit>(p, stream);
}

}  // namespace specdec::cuda
