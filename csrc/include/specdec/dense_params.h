// Parameter structs of the dense ops: linear, rms_norm, swiglu, gated_delta_gates. Every one treats each row
// alike: a row's numbers do not depend on the other rows of the call.
#pragma once

#include <cstdint>

#include "specdec/types.h"

namespace specdec {

// Rows of a tensor [outer, inner, D] whose last dimension is contiguous. Row r is (r / inner, r % inner).
struct RowsView {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t rows = 0;                            // outer * inner
  int64_t inner = 1;                           // at least 1
  int64_t stride_outer = 0, stride_inner = 0;  // elements
};

// A weight [N, K] in panels of kPanelWidth outputs; outputs beyond N are zero rows.
//   float32:  [panels, K, 32], output j of a panel at j.
//   bfloat16: [panels, K, 16, 2], output j at [j, 0] and output j + 16 at [j, 1]: as one 32-bit word, the
//             second is a float32 after masking and the first after a shift.
//   int8:     [panels, K + 4, 32], output j of a panel at j; the last four rows of a panel are its 32 float32
//             scales, with which the sums are multiplied.
constexpr int64_t kPanelWidth = 32;
enum class WeightType : int32_t { kFloat32, kBFloat16, kInt8 };
constexpr int64_t kScaleRows = 4;  // of an int8 panel

// What `linear` does to a row of x before the product.
enum class LinearInput : int32_t {
  kPlain,    // x [rows, K]
  kRmsNorm,  // x [rows, K], normed in groups of norm_size, times silu(gate) where given
  kSwiglu,   // x [rows, 2K]: silu(first half) * second half
};

struct LinearParams {
  int64_t K = 0, N = 0;          // inputs, outputs
  RowsView x;                    // [rows, K]
  const void* weight = nullptr;  // packed, see above
  WeightType weight_type = WeightType::kFloat32;
  const float* bias = nullptr;     // [N]
  const void* residual = nullptr;  // [rows, N] contiguous, dtype of x; added last
  void* y = nullptr;               // [rows, N] contiguous, dtype of x

  LinearInput input = LinearInput::kPlain;
  int64_t norm_size = 0;               // divides K
  const float* norm_weight = nullptr;  // [norm_size]
  float norm_eps = 0.0f;
  bool has_gate = false;
  RowsView gate;  // [rows, K], dtype of x
};

// y = x * rsqrt(mean(x^2) + eps) * weight, times silu(gate) where given.
struct RmsNormParams {
  int64_t D = 0;
  RowsView x;
  bool has_gate = false;
  RowsView gate;                  // [rows, D], dtype of x
  const float* weight = nullptr;  // [D]
  float eps = 0.0f;
  void* y = nullptr;  // [rows, D] contiguous, dtype of x
};

// y = silu(x[:, :F]) * x[:, F:].
struct SwigluParams {
  int64_t F = 0;
  RowsView x;         // [rows, 2F]
  void* y = nullptr;  // [rows, F] contiguous, dtype of x
};

// g = -exp(A_log) * softplus(a + dt_bias), beta = sigmoid(b), twice that where neg_eigval.
struct GatesParams {
  int64_t HV = 0;
  RowsView a, b;                   // [rows, HV], one dtype
  const float* A_log = nullptr;    // [HV]
  const float* dt_bias = nullptr;  // [HV]
  bool neg_eigval = false;
  float* g = nullptr;     // [rows, HV] contiguous
  float* beta = nullptr;  // [rows, HV] contiguous
};

}  // namespace specdec
