// fp8_linear, linear and their gated forms: checks, buffers, threads. The arithmetic is in
// kernel_template.h.

#include "linear.h"

#include <algorithm>

#include "buffer.h"
#include "checks.h"
#include "linear_pass.h"
#include "ops.h"

namespace quantkit {
namespace {

void run(const LinearCall& call, const KernelSet& kernels, Team& team) {
  if (call.empty()) return;
  Buffer packed;
  Buffer scratch;
  int64_t scratch_size = 0;
  const int64_t rows = rows_of_pass(call, kernels);
  for (int64_t row = 0; row < call.x.batch; row += rows) {
    LinearPass pass = pass_at(call, row, kernels);
    if (packed == nullptr) {  // later passes are no larger
      packed = aligned_buffer(pass.buffer_size());
      scratch_size = pass.scratch_size();
      if (scratch_size > 0) scratch = aligned_buffer(scratch_size * team.size());
    }
    pass.use(packed.get());
    team.for_each(pass.pack_units(), [&](int64_t unit, int64_t) { pass.pack_unit(unit); });
    team.for_each(pass.units(), [&](int64_t unit, int64_t worker) {
      pass.multiply(unit, scratch.get() + worker * scratch_size);
    });
  }
}

// Threads worth waking for a weight of this size; 0 for all. Eight rows cost what reading costs.
int64_t useful_threads(const WeightMatrix& weight, int64_t batch) {
  constexpr int64_t kBytesPerThread = 128 * 1024;
  const int64_t bytes = weight.rows * weight.columns * bytes_of(weight.format);
  return bytes * std::max<int64_t>(1, batch / 8) < 2 * kBytesPerThread ? 1 : 0;
}

LinearTask linear_task(const char* op, const Tensor& x, const WeightMatrix& weight,
                       const std::optional<Tensor>& bias) {
  LinearTask task{};
  task.weight = weight;
  task.out_type = float_type(op, "x", x.scalar_type());
  check_shape(op, "x", x, "[M, K]", {-1, weight.columns});
  check_layout(op, "x", x);
  if (bias.has_value()) {
    task.bias_type = float_type(op, "bias", bias->scalar_type());
    check_shape(op, "bias", *bias, "[N]", {weight.rows});
    check_layout(op, "bias", *bias);
    task.bias = bias->const_data_ptr();
  }
  return task;
}

Rows rows_of(const char* op, const Tensor& x) {
  return {x.const_data_ptr(), float_type(op, "x", x.scalar_type()), x.size(0)};
}

void run_op(const LinearTask& task, const Rows& rows) {
  const KernelSet& kernels = cpu_kernels();
  Team::run(useful_threads(task.weight, rows.batch), kernels,
            [&](Team& team) { run_linear(task, rows, kernels, team); });
}

Tensor gated(const char* op, const Tensor& x, const Tensor& weight, const WeightMatrix& matrix,
             const std::optional<Tensor>& bias, const std::string& activation,
             const OutlierMatrix& outliers = {}) {
  if (matrix.rows % 2 != 0) {
    fail(op, "weight", "gate rows then as many up rows", shape_text(weight.sizes()));
  }
  LinearTask task = linear_task(op, x, matrix, bias);
  task.activation = activation_named(op, activation);
  task.outliers = outliers;
  Tensor out = torch::stable::new_empty(x, {x.size(0), matrix.rows / 2});
  task.out = out.mutable_data_ptr();
  const Rows rows = rows_of(op, x);
  const KernelSet& kernels = cpu_kernels();
  Team::run(useful_threads(matrix, rows.batch), kernels,
            [&](Team& team) { run_gated_linear(task, rows, kernels, team); });
  return out;
}

}  // namespace

bool multiplies_many_rows(Tensor x, Tensor weight, int64_t group_size) {
  const char* op = "multiplies_many_rows";
  WeightMatrix matrix{};
  matrix.columns = weight.size(1);
  const ScalarType type = weight.scalar_type();
  const bool plain =
      type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
  matrix.format = plain ? stored_format(float_type(op, "weight", type)) : weight_format(op, type);
  matrix.group_size = group_size;
  matrix.groups = (matrix.columns + group_size - 1) / group_size;
  return fits_tiles(cpu_kernels(), float_type(op, "x", x.scalar_type()), matrix);
}

void run_linear(LinearTask task, const Rows& x, const KernelSet& kernels, Team& team) {
  run({task, x, false}, kernels, team);
}

void run_gated_linear(LinearTask task, const Rows& x, const KernelSet& kernels, Team& team) {
  run({task, x, true}, kernels, team);
}

Tensor fp8_linear(Tensor x, Tensor weight, Tensor weight_scale, std::optional<Tensor> bias,
                  int64_t group_size, std::optional<ScalarType> dtype,
                  std::optional<Tensor> outlier_columns, std::optional<Tensor> outlier_weight) {
  const char* op = "fp8_linear";
  const WeightMatrix matrix = weight_matrix(op, weight, weight_scale, group_size);
  LinearTask task = linear_task(op, x, matrix, bias);
  if (dtype.has_value()) task.out_type = float_type(op, "dtype", *dtype);
  task.outliers =
      checked_outliers(op, outlier_columns, outlier_weight, matrix.rows, matrix.columns);
  Tensor out = torch::stable::new_empty(x, {x.size(0), matrix.rows}, dtype);
  task.out = out.mutable_data_ptr();
  run_op(task, rows_of(op, x));
  return out;
}

Tensor fp8_gated_linear(Tensor x, Tensor weight, Tensor weight_scale, std::optional<Tensor> bias,
                        int64_t group_size, std::string activation,
                        std::optional<Tensor> outlier_columns,
                        std::optional<Tensor> outlier_weight) {
  const char* op = "fp8_gated_linear";
  const WeightMatrix matrix = weight_matrix(op, weight, weight_scale, group_size);
  return gated(op, x, weight, matrix, bias, activation,
               checked_outliers(op, outlier_columns, outlier_weight, matrix.rows, matrix.columns));
}

Tensor linear(Tensor x, Tensor weight, std::optional<Tensor> bias, ScalarType dtype) {
  const char* op = "linear";
  const WeightMatrix matrix = float_matrix(op, weight);
  LinearTask task = linear_task(op, x, matrix, bias);
  task.out_type = float_type(op, "dtype", dtype);
  Tensor out = torch::stable::new_empty(x, {x.size(0), matrix.rows}, dtype);
  task.out = out.mutable_data_ptr();
  run_op(task, rows_of(op, x));
  return out;
}

Tensor gated_linear(Tensor x, Tensor weight, std::optional<Tensor> bias, std::string activation) {
  const char* op = "gated_linear";
  return gated(op, x, weight, float_matrix(op, weight), bias, activation);
}

}  // namespace quantkit
