// A linear layer of any number of rows: packing of x, passes and threads around KernelSet::linear.
#pragma once

#include "kernels.h"
#include "team.h"

namespace quantkit {

// Rows of x, [batch, task.weight.columns], contiguous.
struct Rows {
  const void* data;
  FloatType type;
  int64_t batch;
};

// Fill task.out, [x.batch, task.weight.rows], or half as many columns when gated. The caller sets
// what is in the task but x, batch and features.
void run_linear(LinearTask task, const Rows& x, const KernelSet& kernels, Team& team);
void run_gated_linear(LinearTask task, const Rows& x, const KernelSet& kernels, Team& team);

}  // namespace quantkit
