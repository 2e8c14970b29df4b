// commit/MODE: folds accepted factors into the state. Beside it what else one could do: copy a state that was
// kept a token (snapshot), or step the tokens again, which is the column of_steps. round/...: a commit and
// the next verification of 8 tokens, in two launches or in one.
#include "layers.h"

namespace specdec::bench {
namespace {

constexpr int64_t kTokens = 8;

std::string shape(const Heads& heads, int64_t B, int64_t factors) {
  return std::string("/") + heads.name + "/B:" + std::to_string(B) + "/P:" + std::to_string(factors);
}

void add_mode(const char* mode_name, CommitMode mode, const Heads& heads, int64_t B, int64_t factors) {
  add(std::string("commit/") + mode_name + shape(heads, B, factors), [=]() -> Result {
    const Layers layers(heads, B, 1, factors);
    if (layers.sets() <= 0) return {{-1.0, kTooSmall}};
    const Time time = checked(layers, layers.commit(0, factors, mode), [&](int64_t set, cudaStream_t s) {
      return cuda::commit(layers.commit(set, factors, mode), s);
    });
    return {time, layers.commit_bytes(factors), steps(heads, B, factors)};
  });
}

void add_snapshot(const Heads& heads, int64_t B) {
  add(std::string("commit/snapshot/") + heads.name + "/B:" + std::to_string(B), [=]() -> Result {
    const Layers layers(heads, B, 1, 1);
    if (layers.sets() < 2) return {{-1.0, kTooSmall}};
    const auto bytes = static_cast<size_t>(layers.state_bytes());
    const Time time = replay(
        [&](int64_t set, cudaStream_t s) {
          return cudaMemcpyAsync(layers.state(set), layers.state((set + layers.sets() / 2) % layers.sets()),
                                 bytes, cudaMemcpyDeviceToDevice, s) == cudaSuccess
                     ? Status::kOk
                     : Status::kLaunchFailed;
        },
        layers.sets());
    return {time, 2.0 * static_cast<double>(bytes)};
  });
}

void add_round(bool fused, const Heads& heads, int64_t B) {
  add(std::string("round/") + (fused ? "fused" : "separate") + shape(heads, B, kTokens), [=]() -> Result {
    const Layers layers(heads, B, kTokens, kTokens);
    if (layers.sets() <= 0) return {{-1.0, kTooSmall}};
    const auto verify = [&](int64_t set) {
      return layers.verify(set, Strategy::kSerial, false, fused ? kTokens : 0);
    };
    const Time time = checked(layers, verify(0), [&](int64_t set, cudaStream_t s) {
      if (!fused) {
        const Status status = cuda::commit(layers.commit(set, kTokens, CommitMode::kExact), s);
        if (status != Status::kOk) return status;
      }
      return layers.run(verify(set), s);
    });
    return {time, layers.verify_bytes(kTokens), steps(heads, B, kTokens)};
  });
}

}  // namespace

void add_commit() {
  for (const Heads& heads : {kQwen, kSpecLA}) {
    for (const int64_t B : {1, 32, 256}) {
      for (const int64_t factors : {4, 8, 16}) {
        add_mode("exact", CommitMode::kExact, heads, B, factors);
        add_mode("fast", CommitMode::kFast, heads, B, factors);
      }
      add_snapshot(heads, B);
      for (const bool fused : {false, true}) add_round(fused, heads, B);
    }
  }
}

}  // namespace specdec::bench
