// dequantize_weight: weight codes to floats, for callers with too many rows for fp8_linear.

#include <algorithm>

#include "checks.h"
#include "ops.h"

namespace quantkit {

// Elements below which a second thread costs more than it brings.
constexpr int64_t kElementsPerThread = 128 * 1024;

Tensor dequantize_weight(Tensor weight, Tensor weight_scale, int64_t group_size, ScalarType dtype) {
  const char* op = "dequantize_weight";
  DequantizeTask task{};
  task.weight = weight_matrix(op, weight, weight_scale, group_size);
  task.out_type = float_type(op, "dtype", dtype);
  Tensor out = torch::stable::new_empty(weight, weight.sizes(), dtype);
  if (out.numel() == 0) return out;
  task.out = out.mutable_data_ptr();
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / task.weight.columns);
  const KernelSet& kernels = cpu_kernels();
  torch::stable::parallel_for(0, task.weight.rows, grain, [&](int64_t begin, int64_t end) {
    kernels.dequantize(task, begin, end);
  });
  return out;
}

}  // namespace quantkit
