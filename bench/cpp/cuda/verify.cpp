// verify/STRATEGY/SHAPE/HEADS/B/N/pending: one verification of N tokens in B sequences.
#include <algorithm>

#include "layers.h"

namespace specdec::bench {
namespace {

struct Variant {
  const char* name;
  Strategy strategy;
  Precision precision;
};
constexpr Variant kSerial = {"serial", Strategy::kSerial, Precision::kIeee};
constexpr Variant kHybrid = {"hybrid", Strategy::kHybrid, Precision::kIeee};
constexpr Variant kSolve = {"solve", Strategy::kSolve, Precision::kTf32x3};
constexpr Variant kSolveTf32 = {"solve_tf32", Strategy::kSolve, Precision::kTf32};
constexpr Variant kSolveBf16 = {"solve_bf16", Strategy::kSolve, Precision::kBf16};

void add_one(const Variant& variant, const Heads& heads, int64_t B, int64_t N, bool tree, bool deferred) {
  // As many factors as a good round accepts.
  const int64_t pending = deferred ? std::min<int64_t>(N, 8) : 0;
  const std::string name = std::string("verify/") + variant.name + (tree ? "/tree/" : "/chain/") +
                           heads.name + "/B:" + std::to_string(B) + "/N:" + std::to_string(N) +
                           "/pending:" + std::to_string(pending);
  add(name, [=]() -> Result {
    const Layers layers(heads, B, N, std::max<int64_t>(pending, 1));
    if (layers.sets() <= 0) return {{-1.0, kTooSmall}};
    const auto params = [&](int64_t set) {
      VerifyParams p = layers.verify(set, variant.strategy, tree, pending);
      p.precision = variant.precision;
      return p;
    };
    const Time time =
        checked(layers, params(0), [&](int64_t set, cudaStream_t s) { return layers.run(params(set), s); });
    return {time, layers.verify_bytes(pending), steps(heads, B, N)};
  });
}

// On a chain hybrid is serial.
void add_shape(const Heads& heads, int64_t B, int64_t N) {
  for (const bool pending : {false, true}) {
    for (const Variant& variant : {kSerial, kSolve}) add_one(variant, heads, B, N, false, pending);
    if (N < 4) continue;
    for (const Variant& variant : {kSerial, kHybrid, kSolve}) add_one(variant, heads, B, N, true, pending);
  }
}

}  // namespace

void add_verify() {
  for (const int64_t B : {1, 2, 4, 8, 16, 32, 64, 128, 256}) {
    for (const int64_t N : {1, 2, 4, 8, 16, 32, 64}) {
      if (B == 1 || B == 32 || N == 4 || N == 8 || N == 16) add_shape(kQwen, B, N);
    }
  }
  for (const int64_t B : {1, 32, 256}) {
    for (const int64_t N : {4, 8}) add_shape(kWide, B, N);
  }
  for (const int64_t B : {1, 32}) {
    for (const int64_t N : {8, 16, 32}) add_shape(kSpecLA, B, N);
  }
  for (const int64_t B : {1, 32}) {
    for (const int64_t N : {16, 64}) {
      for (const Variant& variant : {kSolveTf32, kSolveBf16}) add_one(variant, kQwen, B, N, true, false);
    }
  }
  for (const int64_t N : {128, 256}) add_one(kSolve, kQwen, 1, N, true, false);
}

}  // namespace specdec::bench
