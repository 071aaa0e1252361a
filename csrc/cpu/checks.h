// Argument checks of the CPU ops: the shared ones, and that tensors are on the CPU.
#pragma once

#include "../checks.h"
#include "kernels.h"

namespace quantkit {

inline void check_layout(const char* op, const char* argument, const Tensor& tensor) {
  if (!tensor.is_cpu()) fail(op, argument, "on the CPU like x", "a tensor on another device");
  check_contiguous(op, argument, tensor);
}

inline void check_rows(const char* op, const char* argument, const Tensor& tensor) {
  if (!tensor.is_cpu()) fail(op, argument, "on the CPU", "a tensor on another device");
  check_side_by_side(op, argument, tensor);
}

// The same, and that the columns are below `features`, so that x may be read there.
inline OutlierMatrix checked_outliers(const char* op, const std::optional<Tensor>& columns,
                                      const std::optional<Tensor>& weight, int64_t rows,
                                      int64_t features) {
  const OutlierMatrix outliers = outlier_matrix(op, columns, weight, rows);
  for (int64_t i = 0; i < outliers.count; ++i) {
    if (outliers.columns[i] < 0 || outliers.columns[i] >= features) {
      fail(op, "outlier_columns", "in [0, " + std::to_string(features) + ")",
           std::to_string(outliers.columns[i]));
    }
  }
  return outliers;
}

// The leading features of each head that cos and sin turn, [rows, rotary_dim].
inline int64_t checked_angles(const char* op, const Tensor& cos, const Tensor& sin,
                              int64_t head_dim, const Tensor& x) {
  const int64_t turned = cos.size(1);
  check_shape(op, "sin", sin, "cos's", {cos.size(0), turned});
  if (turned % 2 != 0 || turned > head_dim) {
    fail(op, "cos", "of even rotary_dim up to " + std::to_string(head_dim),
         shape_text(cos.sizes()));
  }
  for (const Tensor& angles : {cos, sin}) {
    check_layout(op, "cos and sin", angles);
    check_same_dtype(op, "cos and sin", angles, x);
  }
  return turned;
}

}  // namespace quantkit
