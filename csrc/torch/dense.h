// The dense operators as other bindings of this library call them. `weight` is packed (see LinearParams).
#pragma once

#include "specdec/dense_params.h"
#include "tensor_args.h"

namespace specdec::binding {

// Inputs K of a packed weight; 0 or less for a tensor that is none.
int64_t packed_inputs(const Tensor& weight);

Tensor rms_norm_linear(Tensor x, Tensor norm_weight, double eps, Tensor weight, OptionalTensor bias,
                       int64_t out_features, OptionalTensor gate, OptionalTensor residual);

Tensor swiglu_linear(Tensor x, Tensor weight, OptionalTensor bias, int64_t out_features,
                     OptionalTensor residual);

}  // namespace specdec::binding
