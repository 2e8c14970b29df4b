// Passes over rows by the workers of a team: maxima, bins, sums in the order of sampling_math.h, draws.
#pragma once

#include "sampling_row.cuh"

namespace specdec::cuda {

// Four elements of a lane in the order of sampling_math.h: k is element lane_of() + 32 k of the segment.
// Where rows are whole vectors a lane loads four elements that lie together and exchanges them, so that it
// stands for another lane of the definition.
template <bool kVector>
struct SegmentLanes {
  SPECDEC_DEVICE static int lane_of() { return kVector ? lane() % 8 * 4 + lane() / 8 : lane(); }

  // Zeros beyond the row.
  template <typename T>
  SPECDEC_DEVICE static void load(const Global<const T>& row, int64_t first, int64_t V, float (&x)[4]) {
    if constexpr (kVector) {
      const int64_t i = first + lane() * 4;
      Pack<T, 4> pack{};
      if (i < V) pack = row.template load_vec<4>(i);
      SPECDEC_UNROLL
      for (int k = 0; k < 4; ++k) x[k] = i < V ? float_of(pack[k]) : 0.0f;
      exchange<1>(x);
      exchange<2>(x);
    } else {
      SPECDEC_UNROLL
      for (int k = 0; k < 4; ++k) {
        const int64_t i = first + lane() + 32 * k;
        x[k] = i < V ? float_of(row.load(i)) : 0.0f;
      }
    }
  }

  // The sum over the lanes, halved until one is left; every lane gets it.
  SPECDEC_DEVICE static double sum(double x) {
    SPECDEC_UNROLL
    for (int half = 16; half > 0; half /= 2) {
      const int mask = !kVector ? half : half >= 4 ? half / 4 : half * 8;
      x += double_of(shuffle_xor_64(bits_of(x), mask));
    }
    return x;
  }

 private:
  // Swaps a bit of the element's index with one of the lane's.
  template <int kBit>
  SPECDEC_DEVICE static void exchange(float (&x)[4]) {
    const bool upper = (lane() & 8 * kBit) != 0;
    SPECDEC_UNROLL
    for (int k = 0; k < 4; ++k) {
      if ((k & kBit) != 0) continue;
      const float got = shuffle_xor(upper ? x[k] : x[k | kBit], 8 * kBit);
      x[k] = upper ? got : x[k];
      x[k | kBit] = upper ? x[k | kBit] : got;
    }
  }
};

// The workers. The source has the rows:
//   kScaled                                        the table says what makes their elements
//   Global<const T> row(int)                       a row of logits
//   void elements(command, scale, first, e)          a lane's of a segment, of elements of its own
//   uint64_t pass(command, scale, workers)           of its own, with what the workers have for it
template <typename T, bool kVector, typename Source>
class RowWorkers {
 public:
  using Lanes = SegmentLanes<kVector>;
  static constexpr int kBatch = 8;  // parts that are summed at a time

  SPECDEC_HOST_DEVICE static int64_t shared_bytes(int64_t V) {
    return (parts_of(V) + 1) * 8 + kBins * kWorkers * 8 + 16;
  }

  SPECDEC_DEVICE RowWorkers(Team& team, const Mailbox& mailbox, const RowTable& table, const Source& source,
                            int64_t V, SharedArena& shared)
      : team_(team), mailbox_(mailbox), table_(table), source_(source), V_(V), parts_(parts_of(V)) {
    of_parts_ = shared.take<double>(parts_);
    SharedArena again = shared;  // no pass wants both
    columns_ = shared.take<uint64_t>(kBins * kWorkers);
    of_segments_ = again.take<double>(kBatch * kPart);
    of_elements_ = again.take<double>(kSegment);
    of_warps_ = again.take<uint64_t>(2 * kWorkingWarps);
  }

  SPECDEC_DEVICE void work() {
    for (;;) {
      const Command command = mailbox_.receive();
      // Tokens are chosen before min_p is looked at.
      const bool choosing = command.pass == Pass::kBins || command.elements == kEquals;
      const RowScale scale = command.pass == Pass::kEnd || command.pass == Pass::kGreatest || !Source::kScaled
                                 ? RowScale()
                                 : table_.load(command.row, choosing ? 0.0f : table_.settings.min_p);
      uint64_t result = 0;
      switch (command.pass) {
        case Pass::kEnd:
          return;
        case Pass::kGreatest:
          result = find_greatest(command);
          break;
        case Pass::kBins:
          fill_bins(command, scale);
          break;
        case Pass::kSum:
          result = bits_of(sum(command, scale));
          break;
        case Pass::kDraw:
          result = draw(command, scale);
          break;
        case Pass::kOfSource:
          result = source_.pass(command, scale, *this);
          break;
      }
      mailbox_.answer(result);
    }
  }

  // --- for a pass of the source's ---

  SPECDEC_DEVICE Team& team() { return team_; }
  SPECDEC_DEVICE static void meet() { barrier(kWorkersBarrier, kWorkers); }
  SPECDEC_DEVICE const Shared<uint64_t>& of_warps() const { return of_warps_; }  // two numbers of each

  // f(token, logit) for all elements of the block.
  template <typename F>
  SPECDEC_DEVICE void each(const Global<const T>& row, const F& f) const {
    SPECDEC_ROLL
    for (int64_t part = team_.rank(); part < parts_; part += team_.size()) {
      SPECDEC_UNROLL_BY(4)
      for (int s = warp(); s < kPart; s += kWorkingWarps) {
        const int64_t first = (part * kPart + s) * kSegment;
        float x[4];
        Lanes::load(row, first, V_, x);
        SPECDEC_UNROLL
        for (int k = 0; k < 4; ++k) {
          const int64_t token = first + Lanes::lane_of() + 32 * k;
          if (token < V_) f(token, x[k]);
        }
      }
    }
  }

 private:
  SPECDEC_DEVICE uint64_t find_greatest(const Command& command) {
    uint64_t greatest = 0;
    each(source_.row(command.row),
         [&](int64_t token, float x) { greatest = larger_key(greatest, greatest_key(x, token)); });
    greatest = largest_of_warp(greatest);
    if (lane() == 0) of_warps_.store(warp(), greatest);
    meet();
    if (thread() == 0) {
      for (int w = 1; w < kWorkingWarps; ++w) greatest = larger_key(greatest, of_warps_.load(w));
      team_.put(team_.rank(), greatest);
    }
    team_.meet();
    greatest = 0;
    for (int i = 0; i < team_.size(); ++i) greatest = larger_key(greatest, team_.get(i));
    return greatest;
  }

  // Into the mailbox's bins.
  SPECDEC_DEVICE void fill_bins(const Command& command, const RowScale& scale) {
    const bool by_mass = command.elements == kWeights;
    const int above = command.place + kDigit;
    // Each thread has bins of its own: nothing is added to by two.
    SPECDEC_UNROLL
    for (int bin = 0; bin < kBins; ++bin) columns_.store(bin * kWorkers + thread(), 0);
    each(source_.row(command.row), [&](int64_t token, float x) {
      const uint32_t rank = rank_of(x);
      if (above < 32 && rank >> above != command.rank >> above) return;
      const int at = static_cast<int>(rank >> command.place & (kBins - 1)) * kWorkers + thread();
      columns_.store(at, columns_.load(at) + (by_mass ? mass_of(scale.weight(x, token)) : 1));
    });
    meet();
    for (int bin = warp(); bin < kBins; bin += kWorkingWarps) {
      uint64_t sum = 0;
      SPECDEC_UNROLL
      for (int i = 0; i < kWorkers; i += 32) sum += columns_.load(bin * kWorkers + i + lane());
      SPECDEC_UNROLL
      for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor_64(sum, mask);
      if (lane() == 0) team_.put(team_.rank() * kBins + bin, sum);
    }
    team_.meet();
    if (thread() >= kBins) return;
    uint64_t sum = 0;
    for (int i = 0; i < team_.size(); ++i) sum += team_.get(i * kBins + thread());
    mailbox_.bins.store(thread(), sum);
  }

  SPECDEC_DEVICE void elements(const Command& command, const RowScale& scale, int64_t first,
                               double (&e)[4]) const {
    if (command.elements >= kSourceElements) return source_.elements(command, scale, first, e);
    float x[4];
    Lanes::load(source_.row(command.row), first, V_, x);
    SPECDEC_UNROLL
    for (int k = 0; k < 4; ++k) {
      const int64_t token = first + Lanes::lane_of() + 32 * k;
      const float weight = token < V_ ? scale.weight(x[k], token) : 0.0f;
      e[k] = command.elements == kWeights                     ? static_cast<double>(weight)
             : weight > 0.0f && rank_of(x[k]) == command.rank ? 1.0
                                                              : 0.0;
    }
  }

  // The sums of the segments of `count` parts, each a team apart.
  SPECDEC_DEVICE void sum_segments(const Command& command, const RowScale& scale, int part, int count) const {
    SPECDEC_UNROLL_BY(2)
    for (int f = warp(); f < count * kPart; f += kWorkingWarps) {
      const int64_t first = (int64_t{part + f / kPart * team_.size()} * kPart + f % kPart) * kSegment;
      double e[4] = {};
      if (first < V_) elements(command, scale, first, e);
      const double of_segment = Lanes::sum(((e[0] + e[1]) + e[2]) + e[3]);
      if (lane() == 0) of_segments_.store(f, of_segment);
    }
    meet();
  }

  // The sums of the parts stay for a draw.
  SPECDEC_DEVICE double sum(const Command& command, const RowScale& scale) {
    SPECDEC_ROLL
    for (int part = team_.rank(); part < parts_; part += kBatch * team_.size()) {
      const int left = (parts_ - part + team_.size() - 1) / team_.size();
      const int count = left < kBatch ? left : kBatch;
      sum_segments(command, scale, part, count);
      if (thread() < count) {
        double of_part = 0.0;
        SPECDEC_UNROLL_BY(8)
        for (int s = 0; s < kPart; ++s) of_part += of_segments_.load(thread() * kPart + s);
        team_.put(part + thread() * team_.size(), bits_of(of_part));
      }
      meet();
    }
    team_.meet();
    for (int i = thread(); i < parts_; i += kWorkers) of_parts_.store(i, double_of(team_.get(i)));
    meet();
    double total = 0.0;
    for (int i = 0; i < parts_; ++i) total += of_parts_.load(i);
    return total;
  }

  SPECDEC_DEVICE uint64_t draw(const Command& command, const RowScale& scale) {
    double rest = command.number;
    const int part = descend([&](int i) { return of_parts_.load(i); }, parts_, rest);
    if (part % team_.size() == team_.rank()) {
      sum_segments(command, scale, part, 1);
      const int segment = descend([&](int i) { return of_segments_.load(i); }, kPart, rest);
      const int64_t first = (int64_t{part} * kPart + segment) * kSegment;
      if (warp() == 0) {
        double e[4];
        elements(command, scale, first, e);
        SPECDEC_UNROLL
        for (int k = 0; k < 4; ++k) of_elements_.store(Lanes::lane_of() + 32 * k, e[k]);
      }
      meet();
      const int element = descend([&](int i) { return of_elements_.load(i); }, kSegment, rest);
      if (thread() == 0) team_.put(0, static_cast<uint64_t>(first + element));
    }
    team_.meet();
    return team_.get(0);
  }

  Team& team_;
  const Mailbox& mailbox_;
  const RowTable& table_;
  const Source& source_;
  int64_t V_;
  int parts_;
  Shared<double> of_parts_, of_segments_, of_elements_;
  Shared<uint64_t> columns_, of_warps_;
};

// A kernel whose teams have `rows` rows of V elements each, before what it shares besides.
template <typename Workers>
inline Launch team_launch(const TeamView& team, int64_t rows, int64_t V) {
  const int64_t blocks = team.blocks();
  return {
      {blocks <= INT32_MAX ? static_cast<int32_t>(blocks) : -1, 1, 1},
      Team::kSharedBytes + Mailbox::kSharedBytes + RowTable::shared_bytes(rows) + Workers::shared_bytes(V)};
}

}  // namespace specdec::cuda
