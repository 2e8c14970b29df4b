// Parts of the kernels as each instruction set compiles them, for tests of their bits. No templates and
// nothing inline: every definition is of one build.
#pragma once

#include <cstdint>

namespace specdec::test {

struct IsaBits {
  const char* name;
  // weight_of of n floats, a multiple of 16, as vectors.
  void (*weights)(const float* x, int64_t n, float* out);
  // What is left of the row after the rejection of siblings, as `accept_sampled` sums it: the sum, and the
  // sums of the row's parts. `tokens` null: with replacement.
  double (*left)(const float* logits, int64_t V, const float* const* rows, const double* factors,
                 const double* scales, const int64_t* tokens, int64_t count, double* parts);
  // As for one row after the other; sum of min(q, inverse p).
  double (*overlap)(const float* logits, int64_t V, const float* q, double inverse, double* parts);
  IsaBits* next;
};

extern IsaBits* isa_bits;  // those of this machine and others that it cannot run

}  // namespace specdec::test
