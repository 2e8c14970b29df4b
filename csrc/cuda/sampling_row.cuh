// Rows of logits to sample from, by a team of blocks: which passes over a row it takes to find the maximum,
// the tokens that are kept and the sum. Asked for by the block's control warp, made by its workers
// (sampling_passes.cuh). sampling_math.h says what has to come out, to the bit.
#pragma once

#include "sampling_team.cuh"
#include "specdec/acceptance_params.h"

namespace specdec::cuda {

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

// A pass that the control warp asks the workers for.
struct Command {
  Pass pass = Pass::kEnd;
  int elements = kWeights, row = 0;
  int place = 0;        // of kBins the digit's lowest bit; of the source's elements a child
  uint32_t rank = 0;    // of kEquals; its digits above those of kBins
  double number = 0.0;  // of kDraw, or of the source's elements
};

// In it, by shared memory, the control warp leaves a command for the workers, and they their result.
class Mailbox {
 public:
  static constexpr int kSharedBytes = 32 + 16 + kBins * 8;

  SPECDEC_DEVICE explicit Mailbox(SharedArena& shared) {
    words_ = shared.take<int32_t>(8);
    longs_ = shared.take<uint64_t>(2);
    bins = shared.take<uint64_t>(kBins);
  }

  // By the control warp: the result of the pass it asks for.
  SPECDEC_DEVICE uint64_t run(const Command& command) const {
    warp_barrier();
    if (lane() == 0) {
      words_.store(0, static_cast<int32_t>(command.pass));
      words_.store(1, command.elements);
      words_.store(2, command.row);
      words_.store(3, command.place);
      words_.store(4, static_cast<int32_t>(command.rank));
      longs_.store(0, bits_of(command.number));
    }
    barrier(kCommandBarrier, kSamplingThreads);
    if (command.pass == Pass::kEnd) return 0;
    barrier(kCommandBarrier, kSamplingThreads);
    return longs_.load(1);
  }

  // By the workers.
  SPECDEC_DEVICE Command receive() const {
    barrier(kCommandBarrier, kSamplingThreads);
    Command command;
    command.pass = static_cast<Pass>(words_.load(0));
    command.elements = words_.load(1);
    command.row = words_.load(2);
    command.place = words_.load(3);
    command.rank = static_cast<uint32_t>(words_.load(4));
    command.number = double_of(longs_.load(0));
    return command;
  }
  SPECDEC_DEVICE void answer(uint64_t result) const {
    if (thread() == 0) longs_.store(1, result);
    barrier(kCommandBarrier, kSamplingThreads);
  }

  Shared<uint64_t> bins;

 private:
  Shared<int32_t> words_;
  Shared<uint64_t> longs_;
};

// By the control warp, whose lanes all go the same way.
class RowControl {
 public:
  SPECDEC_DEVICE RowControl(const Mailbox& mailbox, const RowTable& table, int64_t V)
      : mailbox_(mailbox), table_(table), V_(V) {}

  // Finds what makes the row's elements, and the sum of its weights; false where the row has a NaN or no
  // finite maximum.
  SPECDEC_DEVICE bool open(int row, double& sum_of_weights) const {
    Command command;
    command.row = row;
    command.pass = Pass::kGreatest;
    const uint64_t greatest = mailbox_.run(command);
    const uint32_t rank = rank_of_key(greatest);
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
      scale.last_token = token_of_key(greatest);
    }
    store(row, scale);
    const bool some = settings.top_k > 1 && settings.top_k < V_;
    const bool nucleus = settings.top_k != 1 && settings.top_p < 1.0f;
    SPECDEC_ROLL
    for (int by_mass = some ? 0 : 1; by_mass < (nucleus ? 2 : 1); ++by_mass) {
      choose(row, scale, by_mass != 0);
      store(row, scale);
    }
    command.pass = Pass::kSum, command.elements = kWeights;
    sum_of_weights = double_of(mailbox_.run(command));
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
    Command command;
    command.row = row;
    command.elements = by_mass ? kWeights : kEquals;
    command.pass = Pass::kBins;
    uint64_t goal = static_cast<uint64_t>(table_.settings.top_k);
    uint64_t above = 0, equal = 0;  // in number or mass
    SPECDEC_ROLL
    for (command.place = 32 - kDigit; command.place >= 0; command.place -= kDigit) {
      mailbox_.run(command);
      if (by_mass && command.place == 32 - kDigit) {
        uint64_t total = 0;
        SPECDEC_ROLL
        for (int bin = 0; bin < kBins; ++bin) total += mailbox_.bins.load(bin);
        const float top_p = table_.settings.top_p;
        goal = mass_goal(total, top_p > 0.0f ? top_p : 0.0f);
        if (goal == 0) goal = 1;
      }
      int bin = kBins - 1;
      SPECDEC_ROLL
      for (; bin > 0 && above + mailbox_.bins.load(bin) < goal; --bin) above += mailbox_.bins.load(bin);
      equal = mailbox_.bins.load(bin);
      command.rank |= static_cast<uint32_t>(bin) << command.place;
    }
    // Of equal logits the first so many.
    uint64_t of_each = 1;
    if (by_mass) of_each = mass_of(weight_of((logit_of(command.rank) - scale.largest) * scale.inverse_t));
    const uint64_t wanted = of_each > 0 ? (goal - above + of_each - 1) / of_each : 0;
    if (wanted * of_each < equal) {
      command.elements = kEquals;
      command.pass = Pass::kSum;
      mailbox_.run(command);
      command.pass = Pass::kDraw;
      command.number = static_cast<double>(wanted) - 1.0;
      scale.last_token = static_cast<int64_t>(mailbox_.run(command));
    } else if (command.rank != scale.last_rank) {
      scale.last_token = INT64_MAX;
    }
    scale.last_rank = command.rank;
  }

  const Mailbox& mailbox_;
  const RowTable& table_;
  int64_t V_;
};

}  // namespace specdec::cuda
