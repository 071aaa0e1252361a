// Linear layers with outlier columns: the codes' part in float32 first, then the columns' part and
// the one rounding, for a unit of features at a time, while its sums are in cache.
#pragma once

#include "kernels.h"

namespace quantkit {

// Rows [first, last) of out, float32 [batch, outliers.count]: x in the outlier columns.
void gather_outliers(const PackTask& x, const OutlierMatrix& outliers, int64_t first, int64_t last,
                     float* out);

// Floats that features_with_outliers() needs for up to `features` at a time.
inline int64_t outlier_sums_size(const LinearTask& task, int64_t features, bool gated) {
  if (task.outliers.count == 0) return 0;
  return (task.batch * features * (gated ? 2 : 1) + 15) / 16 * 16;
}

// Rows [row, row + rows) of a task's weight as a task of its own, without outliers: `sums` takes
// its result, float32 [batch, rows].
LinearTask part_of(const LinearTask& task, int64_t row, int64_t rows, float* sums);

// Features [begin, end) of the task. `multiply` computes all features of a plain task.
template <class Multiply>
void features_with_outliers(const LinearTask& task, int64_t begin, int64_t end, bool gated,
                            const KernelSet& kernels, float* sums, const Multiply& multiply) {
  const int64_t width = end - begin;
  multiply(part_of(task, begin, width, sums));
  if (!gated) {
    kernels.add_outliers(task, sums, begin, end);
    return;
  }
  float* ups = sums + task.batch * width;
  multiply(part_of(task, task.features + begin, width, ups));
  kernels.add_gated_outliers(task, sums, ups, begin, end);
}

}  // namespace quantkit
