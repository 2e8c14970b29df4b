// The dense operators as other bindings of this library call them. `weight` is packed (see LinearParams).
#pragma once

#include "tensor_args.h"

namespace specdec::binding {

Tensor rms_norm_linear(Tensor x, Tensor norm_weight, double eps, Tensor weight, OptionalTensor bias,
                       int64_t out_features, OptionalTensor gate, OptionalTensor residual);

Tensor swiglu_linear(Tensor x, Tensor weight, OptionalTensor bias, int64_t out_features,
                     OptionalTensor residual);

}  // namespace specdec::binding
