// round_rows, scale_errors and feed_back: checks and threads.

#include <algorithm>

#include "checks.h"
#include "ops.h"

namespace quantkit {
namespace {

// Elements below which a second thread costs more than it brings.
constexpr int64_t kElementsPerThread = 32 * 1024;

RoundingGrid grid_named(const char* op, const std::string& format) {
  if (format == "e4m3") return {448.0f, 0x1p-6f, 1.5f * 0x1p20f};
  if (format == "e5m2") return {57344.0f, 0x1p-14f, 1.5f * 0x1p21f};
  if (format == "e3m4") return {15.5f, 0x1p-2f, 1.5f * 0x1p19f};
  fail(op, "format", "e4m3, e5m2 or e3m4", "'" + format + "'");
}

const float* checked_floats(const char* op, const char* argument, const Tensor& tensor,
                            const char* letters, std::initializer_list<int64_t> shape) {
  if (tensor.scalar_type() != ScalarType::Float) {
    fail(op, argument, "float32", dtype_text(tensor.scalar_type()));
  }
  check_shape(op, argument, tensor, letters, shape);
  check_layout(op, argument, tensor);
  return static_cast<const float*>(tensor.const_data_ptr());
}

template <class Work>
void in_parallel(int64_t items, int64_t elements_each, const Work& work) {
  if (items == 0 || elements_each == 0) return;
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / elements_each);
  torch::stable::parallel_for(0, items, grain, work);
}

}  // namespace

Tensor round_rows(Tensor x, std::optional<Tensor> scale, std::string format) {
  const char* op = "round_rows";
  RoundTask task{};
  task.grid = grid_named(op, format);
  task.type = float_type(op, "x", x.scalar_type());
  check_shape(op, "x", x, "[rows, columns]", {-1, -1});
  check_layout(op, "x", x);
  task.columns = x.size(1);
  if (scale) {
    const bool shared = scale->dim() == 1 && scale->size(0) == 1;
    task.scale_stride = shared ? 0 : 1;
    task.scale = checked_floats(op, "scale", *scale, "[rows] or [1]", {shared ? 1 : x.size(0)});
  }
  Tensor out = torch::stable::new_empty(x, x.sizes());
  task.x = x.const_data_ptr();
  task.out = out.mutable_data_ptr();
  in_parallel(x.size(0), task.columns, [&](int64_t begin, int64_t end) {
    cpu_kernels().round_rows(task, begin, end);
  });
  return out;
}

Tensor scale_errors(Tensor weight, Tensor scales, Tensor importance, std::string format) {
  const char* op = "scale_errors";
  ScaleErrorsTask task{};
  task.grid = grid_named(op, format);
  task.weight = checked_floats(op, "weight", weight, "[N, K]", {-1, -1});
  task.rows = weight.size(0);
  task.columns = weight.size(1);
  const bool shared = scales.dim() == 2 && scales.size(1) == 1;
  task.scales_stride = shared ? 1 : task.rows;
  task.scales =
      checked_floats(op, "scales", scales, "[candidates, N] or [.., 1]", {-1, task.scales_stride});
  task.importance = checked_floats(op, "importance", importance, "[K]", {task.columns});
  task.candidates = scales.size(0);
  Tensor errors = torch::stable::new_empty(weight, {task.candidates, task.rows},
                                           std::make_optional(ScalarType::Double));
  task.errors = static_cast<double*>(errors.mutable_data_ptr());
  const int64_t grain = std::max<int64_t>(
      1, kElementsPerThread / std::max<int64_t>(1, task.columns * task.candidates));
  if (errors.numel() == 0) return errors;
  torch::stable::parallel_for(0, task.rows, grain, [&](int64_t begin, int64_t end) {
    cpu_kernels().scale_errors(task, begin, end);
  });
  return errors;
}

std::tuple<Tensor, Tensor, Tensor> feed_back(Tensor aims, Tensor target, Tensor factor,
                                             Tensor scales, int64_t first_exact,
                                             std::string format) {
  const char* op = "feed_back";
  FeedbackTask task{};
  task.grid = grid_named(op, format);
  task.aims = checked_floats(op, "aims", aims, "[B, N]", {-1, -1});
  task.columns = aims.size(0);
  task.rows = aims.size(1);
  task.target = checked_floats(op, "target", target, "[B, N]", {task.columns, task.rows});
  task.factor = checked_floats(op, "factor", factor, "[B, B]", {task.columns, task.columns});
  task.has_one_scale = scales.dim() == 2 && scales.size(0) == 1;
  task.scales = checked_floats(op, "scales", scales, "[B, N] or [1, N]",
                               {task.has_one_scale ? 1 : task.columns, task.rows});
  task.first_exact = first_exact;
  Tensor steps = torch::stable::new_empty(aims, aims.sizes());
  Tensor error = torch::stable::new_empty(aims, aims.sizes());
  Tensor residual = torch::stable::new_empty(aims, aims.sizes());
  task.steps = static_cast<float*>(steps.mutable_data_ptr());
  task.error = static_cast<float*>(error.mutable_data_ptr());
  task.residual = static_cast<float*>(residual.mutable_data_ptr());
  in_parallel(task.rows, task.columns, [&](int64_t begin, int64_t end) {
    cpu_kernels().feed_back(task, begin, end);
  });
  return {steps, error, residual};
}

}  // namespace quantkit
