// The schemas of the recurrences, of the convolution, of a layer and of sampling; those of the dense ops
// stand in dense.cpp. Mutated arguments say so; defaults live in the Python wrappers.
#include "tensor_args.h"

// Optional tensors are absent where the Python argument is None. Without gate the returned g is an empty [0]
// tensor: an operator's outputs are always tensors. `strategy`, `precision`, `how` and `activation` are
// values of the C++ enums; `how` is a commit's mode, since torch.compile fails on an argument of the name
// `mode`.
STABLE_TORCH_LIBRARY(SPECDEC_NAMESPACE, m) {
  m.def(
      "verify(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor state, Tensor? slots, "
      "Tensor? parents, Tensor? lengths, Tensor? prefix_k, Tensor? prefix_u, Tensor? prefix_g, "
      "Tensor? prefix_parents, float? scale, bool qk_l2norm, "
      "int strategy, int precision) -> (Tensor out, Tensor k, Tensor u, Tensor g)");
  m.def(
      "verify_deferred(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor(a!) state, "
      "Tensor? slots, Tensor? parents, Tensor? lengths, Tensor pending_k, Tensor pending_u, "
      "Tensor? pending_g, Tensor? pending_path, Tensor? pending_path_lengths, float? scale, "
      "bool qk_l2norm, int strategy, int precision) -> (Tensor out, Tensor k, Tensor u, Tensor g)");
  m.def(
      "commit(Tensor(a!) state, Tensor k, Tensor u, Tensor? g, Tensor? path, Tensor? path_lengths, "
      "Tensor? slots, int how) -> ()");
  m.def(
      "prefill(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor(a!) state, Tensor? slots, "
      "Tensor? lengths, Tensor? cu_seqlens, float? scale, bool qk_l2norm, int precision) -> Tensor");
  m.def(
      "conv_verify(Tensor x, Tensor weight, Tensor? bias, Tensor conv_state, Tensor? slots, "
      "Tensor? parents, Tensor? lengths, Tensor? prefix_x, Tensor? prefix_parents, "
      "int activation) -> Tensor");
  m.def(
      "conv_verify_deferred(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) conv_state, Tensor? slots, "
      "Tensor? parents, Tensor? lengths, Tensor pending_x, Tensor? pending_path, "
      "Tensor? pending_path_lengths, int activation) -> Tensor");
  m.def(
      "conv_commit(Tensor(a!) conv_state, Tensor x, Tensor? path, Tensor? path_lengths, "
      "Tensor? slots) -> ()");
  m.def(
      "verify_layer(Tensor mixed, Tensor a, Tensor b, Tensor conv_weight, Tensor? conv_bias, Tensor A_log, "
      "Tensor dt_bias, bool neg_eigval, Tensor conv_state, Tensor state, Tensor? slots, Tensor? parents, "
      "Tensor? lengths, Tensor? prefix_k, Tensor? prefix_u, Tensor? prefix_g, Tensor? prefix_parents, "
      "Tensor? prefix_mixed, Tensor? norm_weight, float norm_eps, Tensor? norm_gate, float? scale, "
      "int strategy) -> (Tensor out, Tensor k, Tensor u, Tensor g)");
  m.def(
      "verify_layer_deferred(Tensor mixed, Tensor a, Tensor b, Tensor conv_weight, Tensor? conv_bias, "
      "Tensor A_log, Tensor dt_bias, bool neg_eigval, Tensor(a!) conv_state, Tensor(b!) state, "
      "Tensor? slots, Tensor? parents, Tensor? lengths, Tensor pending_k, Tensor pending_u, "
      "Tensor? pending_g, Tensor? pending_path, Tensor? pending_path_lengths, Tensor pending_mixed, "
      "Tensor? norm_weight, float norm_eps, Tensor? norm_gate, float? scale, int strategy) -> "
      "(Tensor out, Tensor k, Tensor u, Tensor g)");
  m.def(
      "accept_greedy(Tensor logits, Tensor tokens, Tensor? parents, Tensor? lengths) -> "
      "(Tensor path, Tensor path_lengths, Tensor next_token)");
  m.def(
      "accept_sampled(Tensor logits, Tensor tokens, Tensor? parents, Tensor? lengths, Tensor? draft_probs, "
      "Tensor? draft_rows, Tensor rules, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
      "Tensor seeds, Tensor positions) -> (Tensor path, Tensor path_lengths, Tensor next_token)");
  m.def(
      "sampling_probs(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p) -> "
      "Tensor");
  m.def(
      "draw_tokens(Tensor probs, int count, bool replacement, Tensor seeds, Tensor positions, "
      "Tensor nodes) -> Tensor");
  m.def(
      "tree_attention(Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor cache_lengths, "
      "Tensor? slots, Tensor? parents, Tensor? lengths, Tensor? prefix_k, Tensor? prefix_v, "
      "Tensor? prefix_parents, float? scale) -> Tensor");
}
