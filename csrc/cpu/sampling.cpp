// sampling_probs and draw_tokens: the rows that acceptance sees, and draws from them.
#include "ops.h"
#include "scratch.h"
#include "target_row.h"

namespace specdec::cpu::SPECDEC_ISA {

namespace {

template <typename T>
void write_probs(const SamplingProbsParams& p, int64_t r, char* scratch) {
  const Settings settings(p.sampling, r, p.V);
  double* parts = reinterpret_cast<double*>(scratch);
  Key* keys = reinterpret_cast<Key*>(parts + parts_of(p.V));
  int32_t* listed = reinterpret_cast<int32_t*>(keys + keys_wanted(settings, p.V));
  float* out = p.probs + r * p.V;
  TargetRow<T> row;
  // The weights are made in place.
  if (!row.make(static_cast<const T*>(p.logits) + r * p.stride, p.V, settings, {parts, keys, listed, out})) {
    std::fill(out, out + p.V, NAN);
    return;
  }
  const float inverse_sum = row.made.scale.inverse_sum;
  if (row.support.tokens != nullptr) {
    std::fill(out, out + p.V, 0.0f);
    for (int64_t i = 0; i < row.support.count; ++i) {
      out[row.support.tokens[i]] = row.made.single(row.support.tokens[i]) * inverse_sum;
    }
    return;
  }
  for (int64_t i = 0; i < p.V; ++i) out[i] = out[i] * inverse_sum;
}

struct Arrival {
  double time;
  int64_t token;
  bool operator<(const Arrival& other) const {
    return time < other.time || (time == other.time && token < other.token);
  }
};

// The K earliest arrivals.
class Podium {
 public:
  explicit Podium(int64_t places) : places_(places) {}

  // Token x of probability q > 0 runs with the number u. Most are told to be late by -ln(1 - u) >= u alone;
  // the computed logarithm may be a few units in the last place below u.
  void run(int64_t x, float q, double u) {
    const bool full = count_ == places_;
    if (full && u > first_[0].time * static_cast<double>(q) * (1.0 + 0x1p-48)) return;
    const Arrival arrival{arrival_of(u, q), x};
    if (full && !(arrival < first_[0])) return;
    if (full) std::pop_heap(first_, first_ + count_--);
    first_[count_++] = arrival;
    std::push_heap(first_, first_ + count_);
  }

  // In their order, -1 for places that nobody took.
  void write(int64_t* tokens) {
    std::sort_heap(first_, first_ + count_);
    for (int64_t k = 0; k < places_; ++k) tokens[k] = k < count_ ? first_[k].token : -1;
  }

 private:
  Arrival first_[kMaxDraws];  // a heap, the latest on top
  int64_t places_, count_ = 0;
};

constexpr int kRacers = 128;  // tokens whose numbers are made together

// What `uniform` makes of draws first, first + 1, ...; `first` is even. Two draws share a counter.
void uniform_block(uint64_t seed, int64_t position, uint64_t first, double (&out)[kRacers]) {
  constexpr int kCounters = kRacers / 2;
  uint32_t c0[kCounters], c1[kCounters], c2[kCounters], c3[kCounters];
  for (int i = 0; i < kCounters; ++i) {
    c0[i] = static_cast<uint32_t>(first >> 1) + static_cast<uint32_t>(i);
    c1[i] = static_cast<uint32_t>(RandomStream::kRace);
    c2[i] = static_cast<uint32_t>(position);
    c3[i] = static_cast<uint32_t>(static_cast<uint64_t>(position) >> 32);
  }
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round, k0 += kPhiloxKey0, k1 += kPhiloxKey1) {
    for (int i = 0; i < kCounters; ++i) philox_round(c0[i], c1[i], c2[i], c3[i], k0, k1);
  }
  for (int i = 0; i < kCounters; ++i) {
    out[2 * i] = unit_of(c0[i], c1[i]);
    out[2 * i + 1] = unit_of(c2[i], c3[i]);
  }
}

void race(const DrawParams& p, int64_t r) {
  constexpr int64_t kFew = 4;  // of a block: their numbers are made one by one
  Podium podium(p.K);
  const float* probs = p.probs + r * p.stride;
  double numbers[kRacers];
  for (int64_t begin = 0; begin < p.V; begin += kRacers) {
    const int64_t end = std::min<int64_t>(p.V, begin + kRacers);
    const bool few = std::count_if(probs + begin, probs + end, [](float q) { return q > 0.0f; }) <= kFew;
    if (!few) uniform_block(p.seeds[r], p.positions[r], race_of(p.nodes[r], begin), numbers);
    for (int64_t x = begin; x < end; ++x) {
      if (!(probs[x] > 0.0f)) continue;
      podium.run(x, probs[x],
                 few ? uniform(p.seeds[r], p.positions[r], RandomStream::kRace, race_of(p.nodes[r], x))
                     : numbers[x - begin]);
    }
  }
  podium.write(p.tokens + r * p.K);
}

void draw_independent(const DrawParams& p, int64_t r, double* parts) {
  const GivenElements elements{p.probs + r * p.stride, nullptr, 0};
  const double total = sum_parts(elements, p.V, Support{}, parts);
  for (int64_t k = 0; k < p.K; ++k) {
    const double u = uniform(p.seeds[r], p.positions[r], RandomStream::kDraft, draw_of(p.nodes[r], k));
    p.tokens[r * p.K + k] =
        total > 0.0 && std::isfinite(total) ? draw_from(elements, p.V, Support{}, parts, u * total) : -1;
  }
}

}  // namespace

Status sampling_probs(const SamplingProbsParams& p) {
  int64_t bytes = 0;
  for (int64_t r = 0; r < p.R; ++r) {
    const Settings settings(p.sampling, r, p.V);
    bytes = std::max<int64_t>(
        bytes, keys_wanted(settings, p.V) * sizeof(Key) + listed_wanted(settings) * sizeof(int32_t));
  }
  bytes += parts_of(p.V) * static_cast<int64_t>(sizeof(double));
  return visit_dtype(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    each_sequence(p.R, 1, p.V, [&](int64_t r) {
      write_probs<T>(p, r, reinterpret_cast<char*>(thread_scratch(static_cast<size_t>(bytes) / 4 + 1)));
    });
    return Status::kOk;
  });
}

Status draw_tokens(const DrawParams& p) {
  each_sequence(p.R, 1, p.V, [&](int64_t r) {
    if (p.replacement) {
      const size_t floats = static_cast<size_t>(parts_of(p.V)) * sizeof(double) / sizeof(float);
      draw_independent(p, r, reinterpret_cast<double*>(thread_scratch(floats)));
    } else {
      race(p, r);
    }
  });
  return Status::kOk;
}

}  // namespace specdec::cpu::SPECDEC_ISA
