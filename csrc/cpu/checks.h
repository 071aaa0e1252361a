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

inline const int64_t* checked_integers(const char* op, const char* argument, const Tensor& integers,
                                       const char* letters, int64_t count) {
  if (integers.scalar_type() != ScalarType::Long) {
    fail(op, argument, "int64", dtype_text(integers.scalar_type()));
  }
  check_shape(op, argument, integers, letters, {count});
  check_layout(op, argument, integers);
  return static_cast<const int64_t*>(integers.const_data_ptr());
}

// The same, each from 0 and below `end`.
inline const int64_t* checked_indices(const char* op, const char* argument, const Tensor& indices,
                                      const char* letters, int64_t count, int64_t end) {
  const int64_t* data = checked_integers(op, argument, indices, letters, count);
  for (int64_t i = 0; i < count; ++i) {
    if (data[i] < 0 || data[i] >= end) {
      fail(op, argument, "below " + std::to_string(end), std::to_string(data[i]));
    }
  }
  return data;
}

// As outlier_matrix(), and that the columns are below `features`, so that x may be read there.
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
