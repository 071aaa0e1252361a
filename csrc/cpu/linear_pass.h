// A linear layer of any number of rows, taken apart: which kernels, how many rows of x at a time, and
// units of work for threads. Who runs it has the buffers.
#pragma once

#include "linear.h"

namespace quantkit {

// Rows of x that are packed together and meet the weight at once.
struct LinearPass {
  const KernelSet* kernels;
  LinearTask task;
  PackTask pack;
  bool tiles;    // by a matrix unit
  bool gated;    // act(gate) * up
  int64_t step;  // features of a unit
  float* packed;
  float* outliers;  // x in those columns

  // Floats of packed x, and units that pack it once use() has said where.
  int64_t buffer_size() const;
  void use(float* buffer);
  int64_t pack_units() const;
  void pack_unit(int64_t unit) const;

  // Floats that each worker needs, and units that multiply what is packed.
  int64_t scratch_size() const;
  int64_t units() const { return (task.features + step - 1) / step; }
  void multiply(int64_t unit, float* scratch) const;
};

// A layer and what it is applied to. The caller sets of the task what run_linear() asks for.
struct LinearCall {
  LinearTask task;
  Rows x;
  bool gated;

  int64_t features() const { return gated ? task.weight.rows / 2 : task.weight.rows; }
  bool empty() const { return x.batch == 0 || features() == 0; }
};

bool fits_tiles(const KernelSet& kernels, FloatType x, const WeightMatrix& weight);

// Rows of every pass of the call but the last.
int64_t rows_of_pass(const LinearCall& call, const KernelSet& kernels);
// The pass that begins with a row.
LinearPass pass_at(const LinearCall& call, int64_t row, const KernelSet& kernels);

}  // namespace quantkit
