// argmax_rows and sample_gumbel: checks and threads.

#include "checks.h"
#include "ops.h"

namespace quantkit {
namespace {

Tensor choose(const char* op, const Tensor& scores, const int64_t* keys) {
  check_layout(op, "scores", scores);
  if (scores.scalar_type() != ScalarType::Float) {
    fail(op, "scores", "float32", dtype_text(scores.scalar_type()));
  }
  ChoiceTask task{};
  task.columns = scores.size(1);
  if (task.columns == 0) fail(op, "scores", "of at least one token", shape_text(scores.sizes()));
  const Tensor tokens = torch::stable::new_empty(scores, {scores.size(0)}, ScalarType::Long);
  task.scores = static_cast<const float*>(scores.const_data_ptr());
  task.keys = keys;
  task.tokens = static_cast<int64_t*>(tokens.mutable_data_ptr());
  const KernelSet& kernels = cpu_kernels();
  torch::stable::parallel_for(
      0, scores.size(0), 1,
      [&](int64_t begin, int64_t end) { kernels.choose(task, begin, end); });
  return tokens;
}

}  // namespace

Tensor argmax_rows(Tensor scores) {
  const char* op = "argmax_rows";
  check_shape(op, "scores", scores, "[rows, vocab]", {-1, -1});
  return choose(op, scores, nullptr);
}

Tensor sample_gumbel(Tensor scores, Tensor keys) {
  const char* op = "sample_gumbel";
  check_shape(op, "scores", scores, "[rows, vocab]", {-1, -1});
  check_shape(op, "keys", keys, "[rows]", {scores.size(0)});
  check_layout(op, "keys", keys);
  if (keys.scalar_type() != ScalarType::Long) {
    fail(op, "keys", "int64", dtype_text(keys.scalar_type()));
  }
  return choose(op, scores, static_cast<const int64_t*>(keys.const_data_ptr()));
}

}  // namespace quantkit
