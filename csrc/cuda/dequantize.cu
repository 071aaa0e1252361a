// dequantize_weight: checks and launch.

#include "checks.h"
#include "dequantize.cuh"
#include "ops.h"

namespace quantkit::cuda {

Tensor dequantize_weight(Tensor weight, Tensor weight_scale, int64_t group_size, ScalarType dtype) {
  const char* op = "dequantize_weight";
  const WeightMatrix matrix = weight_matrix(op, weight, weight_scale, group_size);
  float_type(op, "dtype", dtype);
  const Launch launch = launch_on(op, weight, {{"weight_scale", weight_scale}});
  Tensor out = torch::stable::new_empty(weight, weight.sizes(), dtype);
  with_code_format(op, weight.scalar_type(), [&](auto format) {
    with_float_type(op, "dtype", dtype, [&](auto type) {
      using T = decltype(type);
      dispatch_dequantize<decltype(format)>(
          matrix.codes, matrix.scale, mutable_data<T>(out), matrix.rows, matrix.columns,
          matrix.groups, matrix.group_size,
          [&](auto* kernel, int64_t blocks, int threads, auto... arguments) {
            kernel<<<static_cast<unsigned>(blocks), threads, 0, launch.stream()>>>(arguments...);
          });
    });
  });
  launch.check();
  return out;
}

}  // namespace quantkit::cuda
