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
  if (!row.make(static_cast<const T*>(p.logits) + r * p.stride, p.V, settings, parts, keys, listed)) {
    std::fill(out, out + p.V, NAN);
    return;
  }
  const RowElements<T> probs = row.probabilities();
  if (row.support.tokens != nullptr) {
    std::fill(out, out + p.V, 0.0f);
    for (int64_t i = 0; i < row.support.count; ++i) {
      out[row.support.tokens[i]] = probs.single(row.support.tokens[i]);
    }
    return;
  }
  for (int64_t segment = 0; segment < p.V; segment += kSegment) {
    const int64_t end = std::min<int64_t>(p.V, segment + kSegment);
    int64_t i = segment;
    if (probs.plain(segment)) {
      for (; i + Vec::kWidth <= end; i += Vec::kWidth) probs.vec(i).store(out + i);
    }
    for (; i < end; ++i) out[i] = probs.single(i);
  }
}

struct Arrival {
  double time;
  int64_t token;
  bool operator<(const Arrival& other) const {
    return time < other.time || (time == other.time && token < other.token);
  }
};

// The earliest arrivals of a row in order. Most tokens are told apart by -ln(1 - u) >= u alone.
void race(const DrawParams& p, int64_t r) {
  Arrival first[kMaxDraws];  // a heap, the latest on top
  int64_t count = 0;
  const float* probs = p.probs + r * p.stride;
  for (int64_t x = 0; x < p.V; ++x) {
    if (!(probs[x] > 0.0f)) continue;
    const double u = uniform(p.seeds[r], p.positions[r], RandomStream::kRace, race_of(p.nodes[r], x));
    // The computed logarithm may be a few units in the last place below u.
    if (count == p.K && u > first[0].time * static_cast<double>(probs[x]) * (1.0 + 0x1p-48)) continue;
    const Arrival arrival{arrival_of(u, probs[x]), x};
    if (count < p.K) {
      first[count++] = arrival;
      std::push_heap(first, first + count);
    } else if (arrival < first[0]) {
      std::pop_heap(first, first + count);
      first[count - 1] = arrival;
      std::push_heap(first, first + count);
    }
  }
  std::sort_heap(first, first + count);
  for (int64_t k = 0; k < p.K; ++k) p.tokens[r * p.K + k] = k < count ? first[k].token : -1;
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
