// sampling_probs: a team of blocks makes a row of logits one of probabilities, with acceptance's bits.
#pragma once

#include "sampling_passes.cuh"

namespace specdec::cuda {

struct SamplingProbsWork {
  SamplingProbsParams op;
  TeamView team;
};

template <typename T, bool kVector>
struct SamplingProbs {
  using Params = SamplingProbsWork;
  static constexpr int kThreads = kSamplingThreads;

  class Source {
   public:
    static constexpr bool kScaled = true;

    SPECDEC_DEVICE Source(const SamplingProbsParams& p, int64_t r) : p_(p), r_(r) {}
    SPECDEC_DEVICE Global<const T> row(int) const {
      return Global<const T>(static_cast<const T*>(p_.logits)) + r_ * p_.stride;
    }
    SPECDEC_DEVICE void elements(const Command&, const RowScale&, int64_t, double (&)[4]) const {}

    // The probabilities; NaN where the command has a number.
    template <typename Workers>
    SPECDEC_DEVICE uint64_t pass(const Command& command, const RowScale& scale, Workers& workers) const {
      const Global<float> probs = Global<float>(p_.probs) + r_ * p_.V;
      workers.each(row(0), [&](int64_t token, float x) {
        probs.store(token, command.number != 0.0 ? __builtin_nanf("") : scale.probability(x, token));
      });
      return 0;
    }

   private:
    const SamplingProbsParams& p_;
    int64_t r_;
  };
  using Workers = RowWorkers<T, kVector, Source>;

  static Launch shape(const Params& p) { return team_launch<Workers>(p.team, 1, p.op.V); }

  SPECDEC_DEVICE static void run(const Params& p, SharedArena shared) {
    Team team(p.team, shared);
    const Mailbox mailbox(shared);
    const RowTable table(RowSettings(p.op.sampling, team.index()), 1, shared);
    const Source source(p.op, team.index());
    if (is_worker()) {
      Workers(team, mailbox, table, source, p.op.V, shared).work();
    } else {
      double sum = 0.0;
      Command command;
      command.pass = Pass::kOfSource;
      command.number = RowControl(mailbox, table, p.op.V).open(0, sum) ? 0.0 : 1.0;
      mailbox.run(command);
      mailbox.run({});
    }
    team.leave();
  }
};

}  // namespace specdec::cuda
