// accept_sampled: a sequence is one walk; rows are made as the walk comes to them.
#include "accept_rows.h"
#include "ops.h"

namespace specdec::cpu::SPECDEC_ISA {

Status accept_sampled(const AcceptSampledParams& p) {
  return visit_dtype(p.dtype, [&](auto tag) {
    using Rows = SampledRows<decltype(tag)>;
    const size_t floats = static_cast<size_t>(Rows::scratch_bytes(p)) / sizeof(float) + 1;
    each_sequence(p.B, p.N, p.V, [&](int64_t b) {
      if (valid_length(p.draft.lengths, b, p.N) == 0) {
        write_absent(p.accepted, b);
        return;
      }
      Rows rows(p, b, reinterpret_cast<char*>(thread_scratch(floats)));
      const Outcome outcome =
          AcceptanceWalk<Rows>(rows, p.seeds[b], p.positions[b]).run(static_cast<AcceptRule>(p.rules[b]));
      write_outcome(p.accepted, b, rows.tree(), outcome.leaf, outcome.next_token);
    });
    return Status::kOk;
  });
}

}  // namespace specdec::cpu::SPECDEC_ISA
