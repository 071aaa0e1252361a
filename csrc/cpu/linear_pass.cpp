#include "linear_pass.h"

#include <algorithm>

#include "outliers.h"

namespace quantkit {
namespace {

// Weight bytes that a thread takes at a time: a microsecond or two of reading.
constexpr int64_t kUnitBytes = 32 * 1024;
constexpr int64_t kTileRows = 16;

int64_t padded(int64_t floats) { return (floats + 15) / 16 * 16; }

bool uses_tiles(const LinearCall& call, const KernelSet& kernels) {
  return fits_tiles(kernels, call.x.type, call.task.weight) &&
         call.x.batch >= kernels.tiles->fewest_rows;
}

// Outlier columns come between the product and the gate: gates and ups are products of their own.
bool gated_kernel(const LinearPass& pass) { return pass.gated && pass.task.outliers.count == 0; }

int64_t step_of(const LinearPass& pass) {
  const LinearTask& task = pass.task;
  if (pass.tiles) return pass.kernels->tiles->step(task, gated_kernel(pass));
  const WeightMatrix& weight = task.weight;
  const int64_t bytes =
      weight.rows / task.features * weight.columns * bytes_of(weight.format) + 1;
  return (kUnitBytes / bytes / kRowsPerUnit + 1) * kRowsPerUnit;
}

int64_t packed_size(const LinearPass& pass) {
  return padded(pass.tiles ? pass.kernels->tiles->packed_size(pass.pack)
                           : pass.kernels->packed_size(pass.pack));
}

int64_t tile_scratch_size(const LinearPass& pass) {
  return pass.tiles ? padded(pass.kernels->tiles->scratch_size(pass.task)) : 0;
}

}  // namespace

bool fits_tiles(const KernelSet& kernels, FloatType x, const WeightMatrix& weight) {
  return kernels.tiles != nullptr && kernels.tiles->takes(x, weight);
}

int64_t rows_of_pass(const LinearCall& call, const KernelSet& kernels) {
  const WeightMatrix& weight = call.task.weight;
  if (!uses_tiles(call, kernels)) {
    return kernels.pass_rows(call.x.type, weight.format, call.x.batch);
  }
  return std::min(kernels.tiles->max_batch(weight.columns), call.x.batch);
}

LinearPass pass_at(const LinearCall& call, int64_t row, const KernelSet& kernels) {
  const WeightMatrix& weight = call.task.weight;
  LinearPass pass{};
  pass.kernels = &kernels;
  pass.gated = call.gated;
  pass.tiles = uses_tiles(call, kernels);
  pass.task = call.task;
  pass.task.features = call.features();
  pass.task.x_type = call.x.type;
  pass.task.batch =
      static_cast<int>(std::min(rows_of_pass(call, kernels), call.x.batch - row));
  pass.task.out = static_cast<char*>(call.task.out) +
                  row * pass.task.features * bytes_of(call.task.out_type);
  pass.pack = {.x = static_cast<const char*>(call.x.data) +
                    row * weight.columns * bytes_of(call.x.type),
               .type = call.x.type,
               .format = weight.format,
               .batch = pass.task.batch,
               .columns = weight.columns,
               .group_size = weight.group_size};
  pass.step = step_of(pass);
  return pass;
}

int64_t LinearPass::buffer_size() const {
  return packed_size(*this) + padded(task.batch * task.outliers.count);
}

void LinearPass::use(float* buffer) {
  packed = buffer;
  outliers = buffer + packed_size(*this);
  task.x = packed;
  task.outlier_x = outliers;
}

int64_t LinearPass::pack_units() const {
  return tiles ? (task.batch + kTileRows - 1) / kTileRows : 1;
}

void LinearPass::pack_unit(int64_t unit) const {
  if (tiles) {
    kernels->tiles->pack(pack, unit, packed);
  } else {
    kernels->pack(pack, packed);
  }
  const int64_t first = unit * kTileRows;  // more than a pass without tiles has
  const int64_t last = tiles ? std::min<int64_t>(first + kTileRows, task.batch) : task.batch;
  gather_outliers(pack, task.outliers, first, last, outliers);
}

int64_t LinearPass::scratch_size() const {
  const int64_t width = std::min(step, task.features);
  return tile_scratch_size(*this) + outlier_sums_size(task, width, gated);
}

void LinearPass::multiply(int64_t unit, float* scratch) const {
  const int64_t begin = unit * step;
  const int64_t end = std::min(begin + step, task.features);
  const auto plain = [&](const LinearTask& part, int64_t first, int64_t last) {
    if (tiles) return kernels->tiles->linear(part, first, last, scratch);
    kernels->linear(part, first, last);
  };
  if (task.outliers.count > 0) {
    features_with_outliers(task, begin, end, gated, *kernels, scratch + tile_scratch_size(*this),
                           [&](const LinearTask& part) { plain(part, 0, part.features); });
  } else if (!gated) {
    plain(task, begin, end);
  } else if (tiles) {
    kernels->tiles->gated_linear(task, begin, end, scratch);
  } else {
    kernels->gated_linear(task, begin, end);
  }
}

}  // namespace quantkit
