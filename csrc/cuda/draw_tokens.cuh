// draw_tokens: a team of blocks draws from a row of probabilities, independently, or without replacement by
// a race (acceptance_params.h).
#pragma once

#include "sampling_passes.cuh"

namespace specdec::cuda {

struct DrawTokensWork {
  DrawParams op;
  TeamView team;
};

template <bool kVector>
struct DrawTokens {
  using Params = DrawTokensWork;
  static constexpr int kThreads = kSamplingThreads;

  // Who arrives, and when.
  struct Arrival {
    double time = 0.0;
    int32_t token = INT32_MAX;  // nobody

    SPECDEC_DEVICE bool before(const Arrival& other) const {
      if (token == INT32_MAX || other.token == INT32_MAX) return token < other.token;
      return time < other.time || (time == other.time && token < other.token);
    }
  };

  class Source {
   public:
    static constexpr bool kScaled = false;

    SPECDEC_DEVICE Source(const DrawParams& p, int64_t r)
        : V_(p.V),
          row_(Global<const float>(p.probs) + r * p.stride),
          seed_(Global<const uint64_t>(p.seeds).load(r)),
          position_(Global<const int64_t>(p.positions).load(r)),
          node_(Global<const int32_t>(p.nodes).load(r)) {}

    SPECDEC_DEVICE Global<const float> row(int) const { return row_; }
    SPECDEC_DEVICE void elements(const Command&, const RowScale&, int64_t first, double (&e)[4]) const {
      float x[4];
      SegmentLanes<kVector>::load(row_, first, V_, x);
      SPECDEC_UNROLL
      for (int k = 0; k < 4; ++k) e[k] = static_cast<double>(x[k]);
    }

    SPECDEC_DEVICE double draw(int64_t k) const {
      return uniform(seed_, position_, RandomStream::kDraft, draw_of(node_, k));
    }
    SPECDEC_DEVICE double arrival(int64_t token, float q) const {
      return arrival_of(uniform(seed_, position_, RandomStream::kRace, race_of(node_, token)), q);
    }

    // The first to arrive after the token Command::place at the time Command::number.
    template <typename Workers>
    SPECDEC_DEVICE uint64_t pass(const Command& command, const RowScale&, Workers& workers) const {
      const Arrival last{command.number, command.place};
      Arrival best;
      workers.each(row_, [&](int64_t token, float q) {
        if (!(q > 0.0f)) return;
        const Arrival arrival{this->arrival(token, q), static_cast<int32_t>(token)};
        if (last.before(arrival) && arrival.before(best)) best = arrival;
      });
      SPECDEC_UNROLL
      for (int mask = 16; mask > 0; mask /= 2) {
        const Arrival other{double_of(shuffle_xor_64(bits_of(best.time), mask)),
                            shuffle_xor(best.token, mask)};
        if (other.before(best)) best = other;
      }
      Team& team = workers.team();
      const Shared<uint64_t> of_warps = workers.of_warps();
      if (lane() == 0) {
        of_warps.store(2 * warp(), static_cast<uint64_t>(best.token));
        of_warps.store(2 * warp() + 1, bits_of(best.time));
      }
      workers.meet();
      if (thread() == 0) {
        for (int w = 1; w < kWorkingWarps; ++w) {
          const Arrival other{double_of(of_warps.load(2 * w + 1)),
                              static_cast<int32_t>(of_warps.load(2 * w))};
          if (other.before(best)) best = other;
        }
        team.put(2 * team.rank(), static_cast<uint64_t>(best.token));
        team.put(2 * team.rank() + 1, bits_of(best.time));
      }
      team.meet();
      for (int i = 0; i < team.size(); ++i) {
        const Arrival other{double_of(team.get(2 * i + 1)), static_cast<int32_t>(team.get(2 * i))};
        if (i == 0 || other.before(best)) best = other;
      }
      return static_cast<uint64_t>(best.token);
    }

   private:
    int64_t V_;
    Global<const float> row_;
    uint64_t seed_;
    int64_t position_;
    int32_t node_;
  };
  using Workers = RowWorkers<float, kVector, Source>;

  static Launch shape(const Params& p) { return team_launch<Workers>(p.team, 1, p.op.V); }

  SPECDEC_DEVICE static void run(const Params& p, SharedArena shared) {
    Team team(p.team, shared);
    const Mailbox mailbox(shared);
    const RowTable table(RowSettings{}, 1, shared);
    const Source source(p.op, team.index());
    if (is_worker()) {
      Workers(team, mailbox, table, source, p.op.V, shared).work();
    } else {
      const Global<int64_t> tokens = Global<int64_t>(p.op.tokens) + team.index() * p.op.K;
      const auto write = [&](int64_t k, int64_t token) {
        if (team.rank() == 0 && lane() == 0) tokens.store(k, token);
      };
      if (p.op.replacement) {
        draw(p.op, mailbox, source, write);
      } else {
        race(p.op, mailbox, source, write);
      }
      mailbox.run({});
    }
    team.leave();
  }

 private:
  template <typename Write>
  SPECDEC_DEVICE static void draw(const DrawParams& p, const Mailbox& mailbox, const Source& source,
                                  const Write& write) {
    Command command;
    command.elements = kSourceElements;
    command.pass = Pass::kSum;
    const double sum = double_of(mailbox.run(command));
    const bool any = sum > 0.0 && sum < static_cast<double>(__builtin_inff());
    command.pass = Pass::kDraw;
    SPECDEC_ROLL
    for (int64_t k = 0; k < p.K; ++k) {
      command.number = source.draw(k) * sum;
      write(k, any ? static_cast<int64_t>(mailbox.run(command)) : -1);
    }
  }

  template <typename Write>
  SPECDEC_DEVICE static void race(const DrawParams& p, const Mailbox& mailbox, const Source& source,
                                  const Write& write) {
    Command command;
    command.pass = Pass::kOfSource;
    command.number = -1.0;  // before all
    command.place = -1;
    bool any = true;
    SPECDEC_ROLL
    for (int64_t k = 0; k < p.K; ++k) {
      if (any) command.place = static_cast<int>(mailbox.run(command));
      any = any && command.place != INT32_MAX;
      if (any) command.number = source.arrival(command.place, source.row(0).load(command.place));
      write(k, any ? command.place : -1);
    }
  }
};

}  // namespace specdec::cuda
