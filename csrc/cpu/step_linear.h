// Linear layers as ops take them that have many: five tensors each, an empty one standing for none.
#pragma once

#include "checks.h"

namespace quantkit {

// Weight, scale, bias, outlier columns and outlier weight.
constexpr int kLinearTensors = 5;

// A layer of that many rows and columns, negative ones admitting any; all of its task that does not
// depend on x.
inline LinearTask step_linear(const char* op, const Tensor* tensors, int64_t group_size,
                              int64_t rows, int64_t columns, FloatType out_type) {
  const Tensor &weight = tensors[0], &scale = tensors[1], &bias = tensors[2];
  LinearTask task{};
  task.weight = scale.numel() > 0 ? weight_matrix(op, weight, scale, group_size)
                                  : float_matrix(op, weight);
  check_shape(op, "weight", weight, "[N, K]", {rows, columns});
  if (bias.numel() > 0) {
    check_shape(op, "bias", bias, "[N]", {task.weight.rows});
    check_layout(op, "bias", bias);
    task.bias_type = float_type(op, "bias", bias.scalar_type());
    task.bias = bias.const_data_ptr();
  }
  if (tensors[3].numel() > 0) {
    task.outliers = checked_outliers(op, tensors[3], tensors[4], task.weight.rows,
                                     task.weight.columns);
  }
  task.out_type = out_type;
  return task;
}

}  // namespace quantkit
