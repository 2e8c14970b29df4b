// Binding of prefill.
#include "backend.h"
#include "recurrence_args.h"

namespace specdec::binding {

namespace {

// cu_seqlens int32 [sequences + 1]: starts at 0, ascends, ends at the last token.
const int32_t* sequence_ends(const Tensor& cu_seqlens, int64_t tokens) {
  check_dtype(cu_seqlens, "cu_seqlens", ScalarType::Int);
  check_shape(cu_seqlens, "cu_seqlens", {-1}, "[B + 1]");
  check_contiguous(cu_seqlens, "cu_seqlens");
  const int64_t entries = cu_seqlens.size(0);
  STD_TORCH_CHECK(entries >= 1, "cu_seqlens: got no entries, want B + 1");
  const int32_t* ends = static_cast<const int32_t*>(cu_seqlens.const_data_ptr());
  if (!values_on_host()) return ends;
  STD_TORCH_CHECK(ends[0] == 0 && ends[entries - 1] == tokens, "cu_seqlens: got ", ends[0], " to ",
                  ends[entries - 1], ", want 0 to the ", tokens, " tokens of q");
  for (int64_t i = 1; i < entries; ++i) {
    STD_TORCH_CHECK(ends[i] >= ends[i - 1], "cu_seqlens: entry ", i, " is ", ends[i], " after ", ends[i - 1],
                    ", want ascending entries");
  }
  return ends;
}

Tensor prefill(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
               const OptionalTensor& beta, const Tensor& state, const OptionalTensor& slots,
               const OptionalTensor& lengths, const OptionalTensor& cu_seqlens, std::optional<double> scale,
               bool qk_l2norm, int64_t precision) {
  const Named inputs[] = {{"q", q},
                          {"k", k},
                          {"v", v},
                          {"g", g},
                          {"beta", beta},
                          {"slots", slots},
                          {"lengths", lengths},
                          {"cu_seqlens", cu_seqlens}};
  const Operands operands{{{"state", state}}, Access::kWrite, inputs};
  const Device device = device_of(operands);
  PrefillParams p;
  fill_tokens(p, q, k, v, g, beta, scale, qk_l2norm);
  p.precision = precision_of(precision, true);
  p.B = q.size(0);
  p.T = q.size(1);
  if (cu_seqlens.has_value()) {
    STD_TORCH_CHECK(!lengths.has_value(), "lengths: got both lengths and cu_seqlens, want one");
    STD_TORCH_CHECK(p.B == 1, "q: got ", p.B, " rows with cu_seqlens, want packed sequences in one row");
    p.cu_seqlens = sequence_ends(*cu_seqlens, p.T);
    p.B = cu_seqlens->size(0) - 1;
  }
  p.lengths = int32_or_null(lengths, "lengths", {p.B}, "[B]");
  p.state = state_view(state, p.rec, Access::kWrite);
  p.slots = slots_view(slots, p.B, p.state.slots, "state").slots;
  check_apart(operands);
  Tensor out = new_contiguous(device, {v.size(0), p.T, p.rec.HV, p.rec.DV}, aoti_dtype(v));
  p.out = out.mutable_data_ptr();
  const Named outputs[] = {{"out", out}};
  check_status(run(p, operands, outputs), "prefill");
  return out;
}

}  // namespace

}  // namespace specdec::binding

SPECDEC_OPERATORS(m) { m.impl("prefill", TORCH_BOX(&specdec::binding::prefill)); }
