// gram: checks, scratch, threads.

#include <algorithm>

#include "buffer.h"
#include "checks.h"
#include "ops.h"

namespace quantkit {

Tensor gram(Tensor rows) {
  const char* op = "gram";
  if (rows.scalar_type() != ScalarType::BFloat16) {
    fail(op, "rows", "bfloat16", dtype_text(rows.scalar_type()));
  }
  check_shape(op, "rows", rows, "[tokens, K]", {-1, -1});
  check_layout(op, "rows", rows);
  const int64_t columns = rows.size(1);
  Tensor sums = torch::stable::new_empty(rows, {columns, columns},
                                         std::make_optional(ScalarType::Float));
  if (columns == 0) return sums;
  GramTask task{};
  task.rows = rows.const_data_ptr();
  task.sums = static_cast<float*>(sums.mutable_data_ptr());
  task.tokens = rows.size(0);
  task.columns = columns;
  const GramKernels& kernels = *cpu_kernels().gram;
  const Buffer packed = aligned_buffer(kernels.packed_size(task.tokens, columns));
  const int64_t vectors = (columns + kernels.lanes - 1) / kernels.lanes;
  torch::stable::parallel_for(0, vectors, 1, [&](int64_t begin, int64_t end) {
    kernels.pack(task, begin, end, packed.get());
  });
  torch::stable::parallel_for(0, kernels.tiles(columns), 1, [&](int64_t begin, int64_t end) {
    kernels.add(task, begin, end, packed.get());
  });
  return sums;
}

}  // namespace quantkit
