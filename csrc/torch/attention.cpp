// Binding of tree_attention.
#include <cmath>

#include "backend.h"
#include "views.h"

namespace specdec::binding {

namespace {

Strides strides_of_nodes(const Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2)}; }
Strides strides_of_cache(const Tensor& t) { return {t.stride(0), t.stride(2), t.stride(1)}; }

// Keys or values of `like`'s dtype.
void check_entries(const Tensor& t, const char* name, std::initializer_list<int64_t> want, const char* dims,
                   const Tensor& like) {
  check_shape(t, name, want, dims);
  check_dtype(t, name, like.scalar_type());
  check_last_contiguous(t, name);
}

void fill_queries(TreeAttentionParams& p, const Tensor& q, const Tensor& k, const Tensor& v,
                  std::optional<double> scale) {
  check_shape(q, "q", {-1, -1, -1, -1}, "[B, N, HQ, D]");
  p.dtype = float_dtype(q, "q");
  check_last_contiguous(q, "q");
  p.B = q.size(0);
  p.N = q.size(1);
  p.HQ = q.size(2);
  p.D = q.size(3);
  STD_TORCH_CHECK(p.D >= kAttentionMultiple && p.D <= kMaxAttentionWidth && p.D % kAttentionMultiple == 0,
                  "q: got D = ", p.D, ", want a multiple of ", kAttentionMultiple, " up to ",
                  kMaxAttentionWidth);
  check_entries(k, "k", {p.B, p.N, -1, p.D}, "[B, N, HK, D]", q);
  p.HK = k.size(2);
  STD_TORCH_CHECK(p.HK >= 1 && p.HQ >= 1 && p.HQ % p.HK == 0, "q: got ", p.HQ,
                  " query heads, want a multiple of the ", p.HK, " key heads");
  check_entries(v, "v", {p.B, p.N, p.HK, p.D}, "the shape of k", q);
  p.q = q.const_data_ptr();
  p.q_stride = strides_of_nodes(q);
  p.scale = static_cast<float>(scale.has_value() ? *scale : 1.0 / std::sqrt(static_cast<double>(p.D)));
  p.nodes = {k.const_data_ptr(), v.const_data_ptr(), strides_of_nodes(k), strides_of_nodes(v), p.N};
}

void fill_prefix(TreeAttentionParams& p, const Tensor& q, const OptionalTensor& k, const OptionalTensor& v,
                 const OptionalTensor& parents) {
  STD_TORCH_CHECK(k.has_value() == v.has_value(), k.has_value() ? "prefix_v" : "prefix_k",
                  ": got None, want a tensor: keys and values of a prefix come together");
  STD_TORCH_CHECK(k.has_value() || !parents.has_value(),
                  "prefix_k: got None with prefix_parents, want a tensor");
  if (!k.has_value()) return;
  check_entries(*k, "prefix_k", {p.B, -1, p.HK, p.D}, "[B, NP, HK, D]", q);
  const int64_t nodes = k->size(1);
  check_entries(*v, "prefix_v", {p.B, nodes, p.HK, p.D}, "the shape of prefix_k", q);
  p.prefix = {k->const_data_ptr(), v->const_data_ptr(), strides_of_nodes(*k), strides_of_nodes(*v), nodes};
}

void fill_cache(TreeAttentionParams& p, const Tensor& q, const Tensor& k, const Tensor& v,
                const Tensor& lengths) {
  check_entries(k, "k_cache", {-1, p.HK, -1, p.D}, "[S, HK, Tmax, D]", q);
  const int64_t slots = k.size(0), room = k.size(2);
  check_entries(v, "v_cache", {slots, p.HK, room, p.D}, "the shape of k_cache", q);
  p.cache = {k.const_data_ptr(),
             v.const_data_ptr(),
             strides_of_cache(k),
             strides_of_cache(v),
             int32_or_null(lengths, "cache_lengths", {slots}, "[S]"),
             slots,
             room};
}

// A row's slot holds no more tokens than it has room for.
void check_cache_lengths(const TreeAttentionParams& p) {
  if (!values_on_host()) return;
  for (int64_t b = 0; b < p.B; ++b) {
    const int64_t slot = slot_of(p.slots, b);
    if (slot < 0) continue;
    const int32_t length = p.cache.lengths[slot];
    STD_TORCH_CHECK(length >= 0 && length <= p.cache.room, "cache_lengths: slot ", slot, " is ", length,
                    ", want 0 to the ", p.cache.room, " tokens that k_cache has room for");
  }
}

Tensor tree_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
                      const Tensor& v_cache, const Tensor& cache_lengths, const OptionalTensor& slots,
                      const OptionalTensor& parents, const OptionalTensor& lengths,
                      const OptionalTensor& prefix_k, const OptionalTensor& prefix_v,
                      const OptionalTensor& prefix_parents, std::optional<double> scale) {
  const Named inputs[] = {{"q", q},
                          {"k", k},
                          {"v", v},
                          {"cache_lengths", cache_lengths},
                          {"slots", slots},
                          {"parents", parents},
                          {"lengths", lengths},
                          {"prefix_k", prefix_k},
                          {"prefix_v", prefix_v},
                          {"prefix_parents", prefix_parents}};
  const Operands operands{{{"k_cache", k_cache}, {"v_cache", v_cache}}, Access::kRead, inputs};
  const Device device = device_of(operands);
  TreeAttentionParams p;
  fill_queries(p, q, k, v, scale);
  fill_cache(p, q, k_cache, v_cache, cache_lengths);
  fill_prefix(p, q, prefix_k, prefix_v, prefix_parents);
  const int64_t prefix = p.prefix.nodes;
  STD_TORCH_CHECK(p.N + prefix <= kMaxAttentionNodes, "q: got ", p.N, " new nodes and ", prefix,
                  " prefix nodes, want at most ", kMaxAttentionNodes, " in all");
  const Rows rows = slots_view(slots, p.B, p.cache.slots, "k_cache");
  p.slots = rows.slots;
  p.lengths = int32_or_null(lengths, "lengths", {p.B}, "[B]");
  p.parents = parents_view(parents, "parents", rows, p.N, prefix, p.lengths);
  p.prefix_parents = parents_view(prefix_parents, "prefix_parents", rows, prefix, 0, nullptr);
  check_cache_lengths(p);
  Tensor out = new_contiguous(device, {p.B, p.N, p.HQ, p.D}, aoti_dtype(q));
  p.out = out.mutable_data_ptr();
  const Named outputs[] = {{"out", out}};
  check_status(run(p, operands, outputs), "tree_attention");
  return out;
}

}  // namespace

}  // namespace specdec::binding

SPECDEC_OPERATORS(m) { m.impl("tree_attention", TORCH_BOX(&specdec::binding::tree_attention)); }
