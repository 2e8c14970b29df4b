// accept_sampled: exact speculative sampling (acceptance_params.h states the rules). A row of weights is read
// once for its sums and a part of it again for the draw:
//   SampledSums   a block sums one part of a row, in float64
//   SampledDraw   a block finds the part, the segment, the lane and the element at which the cumulative sum
//   passes
//                 u * total; with p_draft it has decided the round then
//   SampledWalk   without p_draft: the walk along the drawn tokens
//
// Summation is a tree whose shape depends on V alone. At each of its levels the sum is inverted from left to
// right. A level's sums may round apart from its parent's: where u * total is not reached, the last positive
// entry is taken, so a token without weight is never drawn.
#pragma once

#include "accept_walk.cuh"

namespace specdec::cuda {

constexpr int kSampledSegment = 128;  // weights of a warp at a time, four a lane
constexpr int kSampledSegments = 64;  // of a part
constexpr int kSampledPart = kSampledSegment * kSampledSegments;

struct AcceptSampledWork {
  AcceptSampledParams op;
  double* sums = nullptr;    // [rows, parts, 2]: of the weights, and of p beside [p - q]+; a row a sequence
                             // with p_draft, a row a node without
  int32_t* draws = nullptr;  // [B, N] without p_draft

  SPECDEC_HOST_DEVICE int64_t rows() const { return op.p_draft != nullptr ? op.B : op.B * op.N; }
  SPECDEC_HOST_DEVICE int parts() const { return static_cast<int>((op.V + kSampledPart - 1) / kSampledPart); }
};

// The row of weights that a block works on.
template <bool kDrafted, bool kVector>
struct WeightRow {
  Global<const float> p, q;
  int64_t V = 0, b = 0;
  int node = 0;           // the weights are those of the token after it
  bool valid = false;     // the row exists
  bool residual = false;  // the weights are [p - q]+

  SPECDEC_DEVICE WeightRow(const AcceptSampledParams& op, int64_t row) : V(op.V) {
    b = kDrafted ? row : row / op.N;
    const int length = draft_length(op.draft, b, op.N);
    if constexpr (kDrafted) {
      valid = length > 0;
      if (valid) decide(op, length);
    } else {
      node = static_cast<int>(row % op.N);
      valid = node < length;
    }
    p = Global<const float>(op.p_target) + b * op.target_stride_b + node * op.target_stride_n;
    if (residual) q = Global<const float>(op.p_draft) + b * op.draft_stride_b + node * op.draft_stride_n;
  }

  // Four weights from element i on, and four of p; zero beyond the row.
  SPECDEC_DEVICE void load(int64_t i, double (&weight)[4], double (&plain)[4]) const {
    float of_p[4] = {}, of_q[4] = {};
    load(p, i, of_p);
    if (residual) load(q, i, of_q);
    SPECDEC_UNROLL
    for (int j = 0; j < 4; ++j) {
      plain[j] = static_cast<double>(of_p[j]);
      const double rest = plain[j] - static_cast<double>(of_q[j]);
      weight[j] = rest <= 0.0 ? 0.0 : rest;  // NaN stays
    }
  }

 private:
  // The first rejection, or the last node. Every warp tests 32 drafts at a time.
  SPECDEC_DEVICE void decide(const AcceptSampledParams& op, int length) {
    const Global<const int64_t> tokens = Global<const int64_t>(op.draft.tokens) + b * op.N;
    const Global<const double> uniforms = Global<const double>(op.accept_uniforms) + b * op.N;
    const Global<const float> target = Global<const float>(op.p_target) + b * op.target_stride_b;
    const Global<const float> drafted = Global<const float>(op.p_draft) + b * op.draft_stride_b;
    for (int first = 0; first < length - 1; first += 32) {
      const int i = first + lane();
      bool rejected = false;
      if (i < length - 1) {
        const int64_t x = tokens.load(i + 1);
        const double of_p = static_cast<double>(target.load(i * op.target_stride_n + x));
        const double of_q = static_cast<double>(drafted.load(i * op.draft_stride_n + x));
        rejected = !(of_q > 0.0 && uniforms.load(i) * of_q < of_p);
      }
      const uint32_t stops = ballot(rejected);
      if (stops != 0) {
        node = first;
        while ((stops >> (node - first) & 1u) == 0) ++node;
        residual = true;
        return;
      }
    }
    node = length - 1;
  }

  SPECDEC_DEVICE void load(const Global<const float>& row, int64_t i, float (&x)[4]) const {
    if constexpr (kVector) {
      if (i >= V) return;
      const Pack<float, 4> pack = row.load_vec<4>(i);
      SPECDEC_UNROLL
      for (int j = 0; j < 4; ++j) x[j] = pack[j];
    } else {
      SPECDEC_UNROLL
      for (int j = 0; j < 4; ++j) {
        if (i + j < V) x[j] = row.load(i + j);
      }
    }
  }
};

SPECDEC_DEVICE double sum_of_warp(double x) {
  for (int mask = 16; mask > 0; mask /= 2) {
    uint32_t words[2];
    __builtin_memcpy(words, &x, sizeof(x));
    words[0] = shuffle_xor(words[0], mask);
    words[1] = shuffle_xor(words[1], mask);
    double other;
    __builtin_memcpy(&other, words, sizeof(other));
    x += other;
  }
  return x;
}

template <bool kDrafted, bool kVector>
struct SampledSums {
  using Params = AcceptSampledWork;
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / 32;

  static Launch shape(const Params& p) {
    const int64_t blocks = p.rows() * p.parts();
    return {{blocks <= INT32_MAX ? static_cast<int32_t>(blocks) : -1, 1, 1},
            2 * kSampledSegments * sizeof(double)};
  }

  SPECDEC_DEVICE static void run(const Params& p, SharedArena shared) {
    const int part = block().x % p.parts();
    const WeightRow<kDrafted, kVector> row(p.op, block().x / p.parts());
    if (!row.valid) return;
    const Shared<double> sums = shared.take<double>(2 * kSampledSegments);
    const Shared<double> plain_sums = sums + kSampledSegments;
    for (int s = warp(); s < kSampledSegments; s += kWarps) {
      double weight[4], plain[4];
      row.load(int64_t{part} * kSampledPart + s * kSampledSegment + lane() * 4, weight, plain);
      const double sum = sum_of_warp(weight[0] + weight[1] + weight[2] + weight[3]);
      if (lane() == 0) sums.store(s, sum);
      if (row.residual) {
        const double plain_sum = sum_of_warp(plain[0] + plain[1] + plain[2] + plain[3]);
        if (lane() == 0) plain_sums.store(s, plain_sum);
      }
    }
    barrier();
    if (thread() > 1 || (thread() == 1 && !row.residual)) return;
    double total = 0.0;
    for (int s = 0; s < kSampledSegments; ++s) total += (thread() == 0 ? sums : plain_sums).load(s);
    Global<double>(p.sums).store(int64_t{block().x} * 2 + thread(), total);
  }
};

// The first of `count` entries, `step` apart, at which their cumulative sum passes `rest`, which then counts
// from there.
SPECDEC_DEVICE int descend(const Shared<double>& entries, int count, double& rest, int step = 1) {
  int last = 0;
  double sum = 0.0, before_last = 0.0;
  for (int i = 0; i < count; ++i) {
    const double entry = entries.load(i * step);
    if (!(entry > 0.0)) continue;
    last = i;
    before_last = sum;
    sum += entry;
    if (sum > rest) break;
  }
  rest -= before_last;
  return last;
}

template <bool kDrafted, bool kVector>
struct SampledDraw {
  using Params = AcceptSampledWork;
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / 32;

  static Launch shape(const Params& p) {
    const int64_t blocks = p.rows();
    // Sums of parts, of segments, of lanes; weights of a segment; what thread 0 found.
    const int64_t doubles = p.parts() + 1 + kSampledSegments + 32 + kSampledSegment + 2;
    return {{blocks <= INT32_MAX ? static_cast<int32_t>(blocks) : -1, 1, 1},
            doubles * static_cast<int64_t>(sizeof(double)) + 16};
  }

  SPECDEC_DEVICE static void run(const Params& p, SharedArena shared) {
    const int64_t index = block().x;
    const WeightRow<kDrafted, kVector> row(p.op, index);
    if (!row.valid) {
      if constexpr (kDrafted) write(p.op, row.b, -1, 0);
      return;
    }
    const int parts = p.parts();
    const Shared<double> of_parts = shared.take<double>(parts);
    const Shared<double> of_segments = shared.take<double>(kSampledSegments);
    const Shared<double> of_lanes = shared.take<double>(32);
    const Shared<double> weights = shared.take<double>(kSampledSegment);
    const Shared<int32_t> found = shared.take<int32_t>(4);
    const Global<const double> sums = Global<const double>(p.sums) + index * parts * 2;

    const double total = sum_of_parts(sums, parts);
    // [p - q]+ vanishes only where p is q up to rounding; there p is the residual's limit.
    const bool plain_only = row.residual && total == 0.0;
    const double sum = plain_only ? sum_of_parts(sums + 1, parts) : total;
    if (!(sum > 0.0 && sum < static_cast<double>(INFINITY))) {
      finish(p, row, index, -1);
      return;
    }
    for (int i = thread(); i < parts; i += kThreads) of_parts.store(i, sums.load(2 * i + plain_only));
    barrier();
    double rest = 0.0;  // thread 0's
    if (thread() == 0) {
      rest = uniform(p.op, row) * sum;
      found.store(0, descend(of_parts, parts, rest));
    }
    barrier();
    const int64_t part = int64_t{found.load(0)} * kSampledPart;
    for (int s = warp(); s < kSampledSegments; s += kWarps) {
      double weight[4];
      load(row, plain_only, part + s * kSampledSegment + lane() * 4, weight);
      const double of_segment = sum_of_warp(weight[0] + weight[1] + weight[2] + weight[3]);
      if (lane() == 0) of_segments.store(s, of_segment);
    }
    barrier();
    if (thread() == 0) found.store(1, descend(of_segments, kSampledSegments, rest));
    barrier();
    const int64_t segment = part + found.load(1) * kSampledSegment;
    if (warp() == 0) {
      double weight[4];
      load(row, plain_only, segment + lane() * 4, weight);
      of_lanes.store(lane(), weight[0] + weight[1] + weight[2] + weight[3]);
      SPECDEC_UNROLL
      for (int j = 0; j < 4; ++j) weights.store(j * 32 + lane(), weight[j]);
    }
    barrier();
    int64_t token = 0;
    if (thread() == 0) {
      const int of_lane = descend(of_lanes, 32, rest);
      token = segment + of_lane * 4 + descend(weights + of_lane, 4, rest, 32);
    }
    finish(p, row, index, token);
  }

 private:
  SPECDEC_DEVICE static double sum_of_parts(const Global<const double>& sums, int parts) {
    double sum = 0.0;
    for (int i = 0; i < parts; ++i) sum += sums.load(2 * i);
    return sum;
  }

  SPECDEC_DEVICE static void load(const WeightRow<kDrafted, kVector>& row, bool plain_only, int64_t i,
                                  double (&x)[4]) {
    double weight[4], plain[4];
    row.load(i, weight, plain);
    SPECDEC_UNROLL
    for (int j = 0; j < 4; ++j) x[j] = plain_only ? plain[j] : weight[j];
  }

  // By the number of tokens the round emitted before this one: the node's depth.
  SPECDEC_DEVICE static double uniform(const AcceptSampledParams& op,
                                       const WeightRow<kDrafted, kVector>& row) {
    int depth = row.node;
    if (!kDrafted && op.draft.parents != nullptr) {
      depth = 0;
      for (int node = row.node; node > 0; ++depth) node = draft_parent(op.draft, row.b, op.N, node);
    }
    return Global<const double>(op.sample_uniforms).load(row.b * op.N + depth);
  }

  // `token` is thread 0's.
  SPECDEC_DEVICE static void finish(const Params& p, const WeightRow<kDrafted, kVector>& row, int64_t index,
                                    int64_t token) {
    if constexpr (kDrafted) {
      write(p.op, row.b, row.node, token);
    } else {
      if (thread() == 0) Global<int32_t>(p.draws).store(index, static_cast<int32_t>(token));
    }
  }

  // The chain down to `node`; -1: nothing.
  SPECDEC_DEVICE static void write(const AcceptSampledParams& op, int64_t b, int node, int64_t token) {
    const Global<int32_t> path = Global<int32_t>(op.accepted.path) + b * op.accepted.max_length;
    for (int64_t i = thread(); i < op.accepted.max_length; i += kThreads) {
      path.store(i, i <= node ? static_cast<int32_t>(i) : 0);
    }
    if (thread() != 0) return;
    Global<int32_t>(op.accepted.path_lengths).store(b, node + 1);
    Global<int64_t>(op.accepted.next_token).store(b, token);
  }
};

struct SampledWalk {
  using Params = AcceptSampledWork;
  static constexpr int kThreads = kWalkThreads;

  static Launch shape(const Params& p) {
    return {{static_cast<int32_t>(p.op.B), 1, 1}, walk_shared_bytes(p.op.N)};
  }

  SPECDEC_DEVICE static void run(const Params& p, SharedArena shared) {
    const int64_t b = block().x;
    const Global<const int32_t> draws = Global<const int32_t>(p.draws) + b * p.op.N;
    walk(p.op.draft, p.op.accepted, p.op.N, b, shared, [&](int n) { return draws.load(n); });
  }
};

}  // namespace specdec::cuda
