// Rows of logits to sample from, by a team of blocks: the maximum, which tokens are kept, sums over whatever
// is made of a row, and draws. sampling_math.h says what has to come out, to the bit. RowControl decides,
// by the control warp, which passes over rows it takes; RowWorkers makes them.
#pragma once

#include "sampling_team.cuh"
#include "specdec/acceptance_params.h"

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

// The logit that has the rank.
SPECDEC_DEVICE float logit_of(uint32_t rank) {
  const uint32_t bits = rank >> 31 ? rank & 0x7fffffffu : ~rank;
  float logit;
  __builtin_memcpy(&logit, &bits, sizeof(logit));
  return logit;
}

// Of one row, or of all rows of a sequence.
struct RowSettings {
  float inverse_t = 1.0f, top_p = 1.0f, min_p = 0.0f;
  int32_t top_k = 0;

  RowSettings() = default;
  SPECDEC_DEVICE RowSettings(const SamplingView& view, int64_t row) {
    const float temperature = Global<const float>(view.temperature).load(row);
    const bool greedy = !(temperature > 0.0f);
    inverse_t = inverse_of(temperature);
    top_k = greedy ? 1 : Global<const int32_t>(view.top_k).load(row);
    if (greedy) return;
    top_p = Global<const float>(view.top_p).load(row);
    min_p = Global<const float>(view.min_p).load(row);
  }
};

// What is known of rows, by their index: RowScale of each but for what the settings say.
class RowTable {
 public:
  SPECDEC_HOST_DEVICE static int64_t shared_bytes(int64_t rows) { return rows * 4 * 4 + 4 * 16; }

  SPECDEC_DEVICE RowTable(const RowSettings& settings, int64_t rows, SharedArena& shared)
      : settings(settings) {
    largest_ = shared.take<float>(rows);
    inverse_sum_ = shared.take<float>(rows);
    last_rank_ = shared.take<uint32_t>(rows);
    last_token_ = shared.take<int32_t>(rows);
  }

  SPECDEC_DEVICE void store(int row, const RowScale& scale) const {
    largest_.store(row, scale.largest);
    inverse_sum_.store(row, scale.inverse_sum);
    last_rank_.store(row, scale.last_rank);
    last_token_.store(row, scale.last_token < INT32_MAX ? static_cast<int32_t>(scale.last_token) : INT32_MAX);
  }
  SPECDEC_DEVICE RowScale load(int row, float min_weight) const {
    RowScale scale;
    scale.largest = largest_.load(row);
    scale.inverse_t = settings.inverse_t;
    scale.inverse_sum = inverse_sum_.load(row);
    scale.min_weight = min_weight;
    scale.last_rank = last_rank_.load(row);
    scale.last_token = last_token_.load(row);
    return scale;
  }
  SPECDEC_DEVICE RowScale load(int row) const { return load(row, settings.min_p); }

  const RowSettings settings;

 private:
  Shared<float> largest_, inverse_sum_;
  Shared<uint32_t> last_rank_;
  Shared<int32_t> last_token_;
};

enum class Pass : int32_t {
  kEnd,
  kGreatest,  // rank and token of the greatest logit, as `greatest_key`
  kBins,      // masses, or numbers, by the digit of the rank
  kSum,
  kDraw,  // the token at which the cumulative sum passes a number, after kSum of the same
  kOfSource,
};

// What is summed and drawn from. A source may have more.
enum Elements : int32_t {
  kWeights,
  kEquals,  // 1 for a token of the rank, whatever min_p says
  kSourceElements,
};

constexpr int kDigit = 4, kBins = 1 << kDigit;  // bits of a rank that a pass finds

// What the control warp orders and what comes of it.
struct Order {
  Pass pass = Pass::kEnd;
  int elements = kWeights, row = 0;
  int place = 0;        // of kBins the digit's lowest bit; of the source's elements a child
  uint32_t rank = 0;    // of kEquals; its digits above those of kBins
  double number = 0.0;  // of kDraw, or of the source's elements
};

class Desk {
 public:
  static constexpr int kSharedBytes = 32 + 16 + kBins * 8;

  SPECDEC_DEVICE explicit Desk(SharedArena& shared) {
    words_ = shared.take<int32_t>(8);
    longs_ = shared.take<uint64_t>(2);
    bins = shared.take<uint64_t>(kBins);
  }

  // By the control warp: the result of what it ordered.
  SPECDEC_DEVICE uint64_t run(const Order& order) const {
    warp_barrier();
    if (lane() == 0) {
      words_.store(0, static_cast<int32_t>(order.pass));
      words_.store(1, order.elements);
      words_.store(2, order.row);
      words_.store(3, order.place);
      words_.store(4, static_cast<int32_t>(order.rank));
      longs_.store(0, bits_of(order.number));
    }
    barrier(kOrderBarrier, kSamplingThreads);
    if (order.pass == Pass::kEnd) return 0;
    barrier(kOrderBarrier, kSamplingThreads);
    return longs_.load(1);
  }

  // By the workers.
  SPECDEC_DEVICE Order receive() const {
    barrier(kOrderBarrier, kSamplingThreads);
    Order order;
    order.pass = static_cast<Pass>(words_.load(0));
    order.elements = words_.load(1);
    order.row = words_.load(2);
    order.place = words_.load(3);
    order.rank = static_cast<uint32_t>(words_.load(4));
    order.number = double_of(longs_.load(0));
    return order;
  }
  SPECDEC_DEVICE void answer(uint64_t result) const {
    if (thread() == 0) longs_.store(1, result);
    barrier(kOrderBarrier, kSamplingThreads);
  }

  Shared<uint64_t> bins;

 private:
  Shared<int32_t> words_;
  Shared<uint64_t> longs_;
};

// By the control warp, whose lanes all go the same way.
class RowControl {
 public:
  SPECDEC_DEVICE RowControl(const Desk& desk, const RowTable& table, int64_t V)
      : desk_(desk), table_(table), V_(V) {}

  // Finds what makes the row's elements, and the sum of its weights; false where the row has a NaN or no
  // finite maximum.
  SPECDEC_DEVICE bool open(int row, double& sum_of_weights) const {
    Order order;
    order.row = row;
    order.pass = Pass::kGreatest;
    const uint64_t greatest = desk_.run(order);
    const uint32_t rank = static_cast<uint32_t>(greatest >> 32);
    const RowSettings& settings = table_.settings;
    RowScale scale;
    if (!is_finite_rank(rank)) {
      store(row, scale);
      return false;
    }
    scale.largest = logit_of(rank);
    scale.inverse_t = settings.inverse_t;
    if (settings.top_k == 1) {
      scale.last_rank = rank;
      scale.last_token = 0xffffffffu - static_cast<uint32_t>(greatest);
    }
    store(row, scale);
    const bool some = settings.top_k > 1 && settings.top_k < V_;
    const bool nucleus = settings.top_k != 1 && settings.top_p < 1.0f;
    SPECDEC_ROLL
    for (int by_mass = some ? 0 : 1; by_mass < (nucleus ? 2 : 1); ++by_mass) {
      choose(row, scale, by_mass != 0);
      store(row, scale);
    }
    order.pass = Pass::kSum, order.elements = kWeights;
    sum_of_weights = double_of(desk_.run(order));
    scale.inverse_sum = static_cast<float>(1.0 / sum_of_weights);
    store(row, scale);
    return true;
  }

 private:
  SPECDEC_DEVICE void store(int row, const RowScale& scale) const {
    warp_barrier();
    if (lane() == 0) table_.store(row, scale);
    warp_barrier();
  }

  // Tokens from the greatest logit on, until they are top_k, or until their mass reaches top_p of that of the
  // tokens kept so far: the rank and the token of the last one. The rank is found digit by digit.
  SPECDEC_DEVICE void choose(int row, RowScale& scale, bool by_mass) const {
    Order order;
    order.row = row;
    order.elements = by_mass ? kWeights : kEquals;
    order.pass = Pass::kBins;
    uint64_t goal = static_cast<uint64_t>(table_.settings.top_k);
    uint64_t above = 0, equal = 0;  // in number or mass
    SPECDEC_ROLL
    for (order.place = 32 - kDigit; order.place >= 0; order.place -= kDigit) {
      desk_.run(order);
      if (by_mass && order.place == 32 - kDigit) {
        uint64_t total = 0;
        SPECDEC_ROLL
        for (int bin = 0; bin < kBins; ++bin) total += desk_.bins.load(bin);
        const float top_p = table_.settings.top_p;
        goal = mass_goal(total, top_p > 0.0f ? top_p : 0.0f);
        if (goal == 0) goal = 1;
      }
      int bin = kBins - 1;
      SPECDEC_ROLL
      for (; bin > 0 && above + desk_.bins.load(bin) < goal; --bin) above += desk_.bins.load(bin);
      equal = desk_.bins.load(bin);
      order.rank |= static_cast<uint32_t>(bin) << order.place;
    }
    // Of equal logits the first so many.
    uint64_t of_each = 1;
    if (by_mass) of_each = mass_of(weight_of((logit_of(order.rank) - scale.largest) * scale.inverse_t));
    const uint64_t wanted = of_each > 0 ? (goal - above + of_each - 1) / of_each : 0;
    if (wanted * of_each < equal) {
      order.elements = kEquals;
      order.pass = Pass::kSum;
      desk_.run(order);
      order.pass = Pass::kDraw;
      order.number = static_cast<double>(wanted) - 1.0;
      scale.last_token = static_cast<int64_t>(desk_.run(order));
    } else if (order.rank != scale.last_rank) {
      scale.last_token = INT64_MAX;
    }
    scale.last_rank = order.rank;
  }

  const Desk& desk_;
  const RowTable& table_;
  int64_t V_;
};

// A logit's rank, and of equal ones the smaller token first.
SPECDEC_DEVICE uint64_t greatest_key(float x, int64_t token) {
  return static_cast<uint64_t>(rank_or_nan(x)) << 32 | (0xffffffffu - static_cast<uint32_t>(token));
}

// The workers. The source has the rows:
//   kScaled                                        the table says what makes their elements
//   Global<const T> row(int)                       a row of logits
//   void elements(order, scale, first, e)          a lane's of a segment, of elements of its own
//   uint64_t pass(order, scale, workers)           of its own, with what the workers have for it
template <typename T, bool kVector, typename Source>
class RowWorkers {
 public:
  using Lanes = SegmentLanes<kVector>;
  static constexpr int kBatch = 8;  // parts that are summed at a time

  SPECDEC_HOST_DEVICE static int64_t shared_bytes(int64_t V) {
    return (parts_of(V) + 1) * 8 + kBins * kWorkers * 8 + 16;
  }

  SPECDEC_DEVICE RowWorkers(Team& team, const Desk& desk, const RowTable& table, const Source& source,
                            int64_t V, SharedArena& shared)
      : team_(team), desk_(desk), table_(table), source_(source), V_(V), parts_(parts_of(V)) {
    of_parts_ = shared.take<double>(parts_);
    SharedArena again = shared;  // no pass wants both
    columns_ = shared.take<uint64_t>(kBins * kWorkers);
    of_segments_ = again.take<double>(kBatch * kPart);
    of_elements_ = again.take<double>(kSegment);
    of_warps_ = again.take<uint64_t>(2 * kWorkingWarps);
  }

  SPECDEC_DEVICE void work() {
    for (;;) {
      const Order order = desk_.receive();
      // Tokens are chosen before min_p is looked at.
      const bool choosing = order.pass == Pass::kBins || order.elements == kEquals;
      const RowScale scale = order.pass == Pass::kEnd || order.pass == Pass::kGreatest || !Source::kScaled
                                 ? RowScale()
                                 : table_.load(order.row, choosing ? 0.0f : table_.settings.min_p);
      uint64_t result = 0;
      switch (order.pass) {
        case Pass::kEnd:
          return;
        case Pass::kGreatest:
          result = find_greatest(order);
          break;
        case Pass::kBins:
          fill_bins(order, scale);
          break;
        case Pass::kSum:
          result = bits_of(sum(order, scale));
          break;
        case Pass::kDraw:
          result = draw(order, scale);
          break;
        case Pass::kOfSource:
          result = source_.pass(order, scale, *this);
          break;
      }
      desk_.answer(result);
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
  SPECDEC_DEVICE uint64_t find_greatest(const Order& order) {
    uint64_t greatest = 0;
    each(source_.row(order.row), [&](int64_t token, float x) {
      const uint64_t key = greatest_key(x, token);
      if (key > greatest) greatest = key;
    });
    SPECDEC_UNROLL
    for (int mask = 16; mask > 0; mask /= 2) {
      const uint64_t other = shuffle_xor_64(greatest, mask);
      if (other > greatest) greatest = other;
    }
    if (lane() == 0) of_warps_.store(warp(), greatest);
    meet();
    if (thread() == 0) {
      for (int w = 1; w < kWorkingWarps; ++w) {
        const uint64_t other = of_warps_.load(w);
        if (other > greatest) greatest = other;
      }
      team_.put(team_.rank(), greatest);
    }
    team_.meet();
    for (int i = 0; i < team_.size(); ++i) {
      const uint64_t other = team_.get(i);
      if (i == 0 || other > greatest) greatest = other;
    }
    return greatest;
  }

  // Into the desk's bins.
  SPECDEC_DEVICE void fill_bins(const Order& order, const RowScale& scale) {
    const bool by_mass = order.elements == kWeights;
    const int above = order.place + kDigit;
    // Each thread has bins of its own: nothing is added to by two.
    SPECDEC_UNROLL
    for (int bin = 0; bin < kBins; ++bin) columns_.store(bin * kWorkers + thread(), 0);
    each(source_.row(order.row), [&](int64_t token, float x) {
      const uint32_t rank = rank_of(x);
      if (above < 32 && rank >> above != order.rank >> above) return;
      const int at = static_cast<int>(rank >> order.place & (kBins - 1)) * kWorkers + thread();
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
    desk_.bins.store(thread(), sum);
  }

  SPECDEC_DEVICE void elements(const Order& order, const RowScale& scale, int64_t first,
                               double (&e)[4]) const {
    if (order.elements >= kSourceElements) return source_.elements(order, scale, first, e);
    float x[4];
    Lanes::load(source_.row(order.row), first, V_, x);
    SPECDEC_UNROLL
    for (int k = 0; k < 4; ++k) {
      const int64_t token = first + Lanes::lane_of() + 32 * k;
      const float weight = token < V_ ? scale.weight(x[k], token) : 0.0f;
      e[k] = order.elements == kWeights                     ? static_cast<double>(weight)
             : weight > 0.0f && rank_of(x[k]) == order.rank ? 1.0
                                                            : 0.0;
    }
  }

  // The sums of the segments of `count` parts, each a team apart.
  SPECDEC_DEVICE void sum_segments(const Order& order, const RowScale& scale, int part, int count) const {
    SPECDEC_UNROLL_BY(2)
    for (int f = warp(); f < count * kPart; f += kWorkingWarps) {
      const int64_t first = (int64_t{part + f / kPart * team_.size()} * kPart + f % kPart) * kSegment;
      double e[4] = {};
      if (first < V_) elements(order, scale, first, e);
      const double of_segment = Lanes::sum(((e[0] + e[1]) + e[2]) + e[3]);
      if (lane() == 0) of_segments_.store(f, of_segment);
    }
    meet();
  }

  // The sums of the parts stay for a draw.
  SPECDEC_DEVICE double sum(const Order& order, const RowScale& scale) {
    SPECDEC_ROLL
    for (int part = team_.rank(); part < parts_; part += kBatch * team_.size()) {
      const int left = (parts_ - part + team_.size() - 1) / team_.size();
      const int count = left < kBatch ? left : kBatch;
      sum_segments(order, scale, part, count);
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

  SPECDEC_DEVICE uint64_t draw(const Order& order, const RowScale& scale) {
    double rest = order.number;
    const int part = descend([&](int i) { return of_parts_.load(i); }, parts_, rest);
    if (part % team_.size() == team_.rank()) {
      sum_segments(order, scale, part, 1);
      const int segment = descend([&](int i) { return of_segments_.load(i); }, kPart, rest);
      const int64_t first = (int64_t{part} * kPart + segment) * kSegment;
      if (warp() == 0) {
        double e[4];
        elements(order, scale, first, e);
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
  const Desk& desk_;
  const RowTable& table_;
  const Source& source_;
  int64_t V_;
  int parts_;
  Shared<double> of_parts_, of_segments_, of_elements_;
  Shared<uint64_t> columns_, of_warps_;
};

}  // namespace specdec::cuda
