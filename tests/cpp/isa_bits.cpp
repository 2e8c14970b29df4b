// Compiled once for each instruction set, as a kernel file is.
#include "isa_bits.h"

#include "accept_rows.h"

namespace specdec::cpu::SPECDEC_ISA {

namespace {

void weights(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += Vec::kWidth) weight_of(Vec::load(x + i)).store(out + i);
}

// A row of probabilities, and where its weights are.
struct Probabilities {
  float* stored;
  TargetRow<float> row;

  Probabilities(const float* logits, int64_t V, double* parts) : stored(new float[V]) {
    const float all = 1.0f, none = 0.0f;
    const int32_t top_k = 0;
    const Settings settings({&all, &top_k, &all, &none}, 0, V);
    row.make(logits, V, settings, {parts, nullptr, nullptr, stored});
  }
  Probabilities(const Probabilities&) = delete;
  ~Probabilities() { delete[] stored; }
};

double left(const float* logits, int64_t V, const float* const* rows, const double* factors,
            const double* scales, const int64_t* tokens, int64_t count, double* parts) {
  const Probabilities p(logits, V, parts);
  const LeftElements<float> elements{p.row.probabilities(), factors, scales, rows, tokens, count};
  return sum_parts(elements, V, Support{}, parts);
}

double overlap(const float* logits, int64_t V, const float* q, double inverse, double* parts) {
  const Probabilities p(logits, V, parts);
  const OverlapElements<float, false> elements{p.row.probabilities(), q, inverse, 0.0};
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
