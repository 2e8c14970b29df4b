// draw_tokens: draws from rows of probabilities, independently, or without replacement by a race.
#include <cmath>

#include "ops.h"
#include "sampling_row.h"
#include "scratch.h"

namespace specdec::cpu::SPECDEC_ISA {

namespace {

struct Arrival {
  double time;
  int64_t token;
  bool operator<(const Arrival& other) const {
    return time < other.time || (time == other.time && token < other.token);
  }
};

// The `capacity` earliest arrivals.
class EarliestArrivals {
 public:
  explicit EarliestArrivals(int64_t capacity) : capacity_(capacity) {}

  // Token x of probability q > 0, with the number u. Most are told to be late by -ln(1 - u) >= u alone;
  // the computed logarithm may be a few units in the last place below u.
  void add(int64_t x, float q, double u) {
    const bool full = count_ == capacity_;
    if (full && u > first_[0].time * static_cast<double>(q) * (1.0 + 0x1p-48)) return;
    const Arrival arrival{arrival_of(u, q), x};
    if (full && !(arrival < first_[0])) return;
    if (full) std::pop_heap(first_, first_ + count_--);
    first_[count_++] = arrival;
    std::push_heap(first_, first_ + count_);
  }

  // In their order, -1 beyond the last.
  void write(int64_t* tokens) {
    std::sort_heap(first_, first_ + count_);
    for (int64_t k = 0; k < capacity_; ++k) tokens[k] = k < count_ ? first_[k].token : -1;
  }

 private:
  Arrival first_[kMaxDraws];  // a heap, the latest on top
  int64_t capacity_, count_ = 0;
};

constexpr int kBlock = 128;  // tokens of a race whose numbers are made together

// What `uniform` makes of draws first, first + 1, ...; `first` is even. Two draws share a counter.
void uniform_block(uint64_t seed, int64_t position, uint64_t first, double (&out)[kBlock]) {
  constexpr int kCounters = kBlock / 2;
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
  EarliestArrivals earliest(p.K);
  const float* probs = p.probs + r * p.stride;
  double numbers[kBlock];
  for (int64_t begin = 0; begin < p.V; begin += kBlock) {
    const int64_t end = std::min<int64_t>(p.V, begin + kBlock);
    const bool few = std::count_if(probs + begin, probs + end, [](float q) { return q > 0.0f; }) <= kFew;
    if (!few) uniform_block(p.seeds[r], p.positions[r], race_of(p.nodes[r], begin), numbers);
    for (int64_t x = begin; x < end; ++x) {
      if (!(probs[x] > 0.0f)) continue;
      earliest.add(x, probs[x],
                   few ? uniform(p.seeds[r], p.positions[r], RandomStream::kRace, race_of(p.nodes[r], x))
                       : numbers[x - begin]);
    }
  }
  earliest.write(p.tokens + r * p.K);
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
