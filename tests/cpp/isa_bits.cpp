// Compiled once for each instruction set, as a kernel file is.
#include "isa_bits.h"

#include "accept_rows.h"

namespace specdec::cpu::SPECDEC_ISA {

namespace {

void weights(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += Vec::kWidth) weight_of(Vec::load(x + i)).store(out + i);
}

RowElements<float> probabilities(const float* logits, int64_t V, double* parts) {
  TargetRow<float> row;
  row.weights.logits = logits;
  find_largest(logits, V, parts, row.weights.scale.largest);
  row.weights.scale.inverse_sum = static_cast<float>(1.0 / sum_parts(row.weights, V, Support{}, parts));
  return row.probabilities();
}

double left(const float* logits, int64_t V, const float* const* rows, const double* factors,
            const double* scales, const int64_t* tokens, int64_t count, double* parts) {
  const LeftElements<float> elements{probabilities(logits, V, parts), factors, scales, rows, tokens, count};
  return sum_parts(elements, V, Support{}, parts);
}

double overlap(const float* logits, int64_t V, const float* q, double inverse, double* parts) {
  const OverlapElements<float, false> elements{probabilities(logits, V, parts), q, inverse, 0.0};
  return sum_parts(elements, V, Support{}, parts);
}

#define SPECDEC_NAME_OF(isa) #isa
#define SPECDEC_NAME(isa) SPECDEC_NAME_OF(isa)

test::IsaBits own{SPECDEC_NAME(SPECDEC_ISA), weights, left, overlap, nullptr};

struct Registration {
  Registration() {
    own.next = test::isa_bits;
    test::isa_bits = &own;
  }
} registration;

}  // namespace

}  // namespace specdec::cpu::SPECDEC_ISA
