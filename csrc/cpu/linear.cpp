// fp8_linear, linear and their gated forms: checks, packing of x, threads. The arithmetic is in
// kernel_template.h.

#include "linear.h"

#include <algorithm>

#include "buffer.h"
#include "checks.h"
#include "ops.h"
#include "outliers.h"

namespace quantkit {
namespace {

// Weight bytes that a thread takes at a time: a microsecond or two of reading.
constexpr int64_t kUnitBytes = 32 * 1024;

enum class Kind { kPlain, kGated };

// Runs a kernel over all rows of x, KernelSet::max_batch at a time, its features split over threads.
void run_rows(LinearTask task, const Rows& x, int64_t features, const KernelSet& kernels,
              Team& team, Kind kind) {
  const auto kernel = kind == Kind::kGated ? kernels.gated_linear : kernels.linear;
  const int64_t columns = task.weight.columns;
  const auto* x_data = static_cast<const char*>(x.data);
  auto* out_data = static_cast<char*>(task.out);
  const int64_t feature_bytes =
      task.weight.rows / features * columns * bytes_of(task.weight.format) + 1;
  const int64_t step = (kUnitBytes / feature_bytes / kRowsPerUnit + 1) * kRowsPerUnit;
  const float* outlier_x = task.outlier_x;
  Buffer packed;
  Buffer sums;
  int64_t sums_size = 0;
  for (int64_t row = 0; row < x.batch; row += kernels.max_batch) {
    task.batch = static_cast<int>(std::min<int64_t>(kernels.max_batch, x.batch - row));
    const PackTask pack{.x = x_data + row * columns * bytes_of(x.type),
                        .type = x.type,
                        .format = task.weight.format,
                        .batch = task.batch,
                        .columns = columns,
                        .group_size = task.weight.group_size};
    if (packed == nullptr) {  // later passes are no larger
      packed = aligned_buffer(kernels.packed_size(pack));
      sums_size = outlier_sums_size(task, std::min(step, features), kind == Kind::kGated);
      sums = aligned_buffer(sums_size * team.size());
    }
    kernels.pack(pack, packed.get());
    task.x = packed.get();
    task.outlier_x = outlier_x + row * task.outliers.count;
    task.out = out_data + row * features * bytes_of(task.out_type);
    team.for_each((features + step - 1) / step, [&](int64_t unit, int64_t worker) {
      const int64_t begin = unit * step;
      const int64_t end = std::min(begin + step, features);
      if (task.outliers.count == 0) return kernel(task, begin, end);
      features_with_outliers(
          task, begin, end, kind == Kind::kGated, kernels, sums.get() + worker * sums_size,
          [&](const LinearTask& part) { kernels.linear(part, 0, part.features); });
    });
  }
}

// The same with tiles.
void run_tiles(LinearTask task, const Rows& x, int64_t features, const KernelSet& set, Team& team,
               Kind kind) {
  constexpr int64_t kTileRows = 16;
  const TileKernels& kernels = *set.tiles;
  const auto kernel = kind == Kind::kGated ? kernels.gated_linear : kernels.linear;
  const int64_t columns = task.weight.columns;
  const auto* x_data = static_cast<const char*>(x.data);
  auto* out_data = static_cast<char*>(task.out);
  const int64_t most = std::min(kernels.max_batch(columns), x.batch);
  // Outlier columns come between the product and the gate: gates and ups are products of their own.
  const bool gated_kernel = kind == Kind::kGated && task.outliers.count == 0;
  const float* outlier_x = task.outlier_x;
  Buffer packed;
  Buffer scratch;
  Buffer sums;
  int64_t sums_size = 0;
  for (int64_t row = 0; row < x.batch; row += most) {
    task.batch = static_cast<int>(std::min(most, x.batch - row));
    const PackTask pack{.x = x_data + row * columns * bytes_of(x.type),
                        .type = x.type,
                        .format = task.weight.format,
                        .batch = task.batch,
                        .columns = columns,
                        .group_size = task.weight.group_size};
    const int64_t size = (kernels.scratch_size(task) + 15) / 16 * 16;
    if (packed == nullptr) {  // later passes are no larger
      packed = aligned_buffer(kernels.packed_size(pack));
      scratch = aligned_buffer(size * team.size());
      sums_size = outlier_sums_size(task, kernels.step(task, gated_kernel), kind == Kind::kGated);
      sums = aligned_buffer(sums_size * team.size());
    }
    team.for_each((task.batch + kTileRows - 1) / kTileRows,
                  [&](int64_t tile, int64_t) { kernels.pack(pack, tile, packed.get()); });
    task.x = packed.get();
    task.out = out_data + row * features * bytes_of(task.out_type);
    task.outlier_x = outlier_x + row * task.outliers.count;
    const int64_t step = kernels.step(task, gated_kernel);
    team.for_each((features + step - 1) / step, [&](int64_t unit, int64_t worker) {
      const int64_t begin = unit * step;
      const int64_t end = std::min(begin + step, features);
      float* own = scratch.get() + worker * size;
      if (task.outliers.count == 0) return kernel(task, begin, end, own);
      features_with_outliers(
          task, begin, end, kind == Kind::kGated, set, sums.get() + worker * sums_size,
          [&](const LinearTask& part) { kernels.linear(part, 0, part.features, own); });
    });
  }
}

bool fits_tiles(const KernelSet& kernels, FloatType x, const WeightMatrix& weight) {
  return kernels.tiles != nullptr && kernels.tiles->takes(x, weight);
}

void run(LinearTask task, const Rows& x, int64_t features, const KernelSet& kernels, Team& team,
         Kind kind) {
  if (x.batch == 0 || features == 0) return;
  task.features = features;
  task.x_type = x.type;
  const Buffer outlier_x = gather_outliers(x, task.weight.columns, task.outliers, team);
  task.outlier_x = outlier_x.get();
  if (fits_tiles(kernels, x.type, task.weight) && x.batch >= kernels.tiles->fewest_rows) {
    run_tiles(task, x, features, kernels, team, kind);
  } else {
    run_rows(task, x, features, kernels, team, kind);
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
  run(task, x, task.weight.rows, kernels, team, Kind::kPlain);
}

void run_gated_linear(LinearTask task, const Rows& x, const KernelSet& kernels, Team& team) {
  run(task, x, task.weight.rows / 2, kernels, team, Kind::kGated);
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
