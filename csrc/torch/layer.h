// The verification of a layer between its projections, as other bindings of this library call it.
#pragma once

#include "recurrence_args.h"

namespace specdec::binding {

Verified verify_layer(const Tensor& mixed, const Tensor& a, const Tensor& b, const Tensor& conv_weight,
                      const OptionalTensor& conv_bias, const Tensor& A_log, const Tensor& dt_bias,
                      bool neg_eigval, const Tensor& conv_state, const Tensor& state,
                      const OptionalTensor& slots, const OptionalTensor& parents,
                      const OptionalTensor& lengths, const OptionalTensor& prefix_k,
                      const OptionalTensor& prefix_u, const OptionalTensor& prefix_g,
                      const OptionalTensor& prefix_parents, const OptionalTensor& prefix_mixed,
                      const OptionalTensor& norm_weight, double norm_eps, const OptionalTensor& norm_gate,
                      std::optional<double> scale, int64_t strategy);

Verified verify_layer_deferred(const Tensor& mixed, const Tensor& a, const Tensor& b,
                               const Tensor& conv_weight, const OptionalTensor& conv_bias,
                               const Tensor& A_log, const Tensor& dt_bias, bool neg_eigval,
                               const Tensor& conv_state, const Tensor& state, const OptionalTensor& slots,
                               const OptionalTensor& parents, const OptionalTensor& lengths,
                               const Tensor& pending_k, const Tensor& pending_u,
                               const OptionalTensor& pending_g, const OptionalTensor& pending_path,
                               const OptionalTensor& pending_path_lengths, const Tensor& pending_mixed,
                               const OptionalTensor& norm_weight, double norm_eps,
                               const OptionalTensor& norm_gate, std::optional<double> scale,
                               int64_t strategy);

}  // namespace specdec::binding
