// argmax_rows, sample_gumbel and draw_rows: checks and threads.

#include "buffer.h"
#include "checks.h"
#include "ops.h"

namespace quantkit {
namespace {

// Returns scores of rows that have columns.
const float* checked_scores(const char* op, const Tensor& scores) {
  check_shape(op, "scores", scores, "[rows, vocab]", {-1, -1});
  check_layout(op, "scores", scores);
  if (scores.scalar_type() != ScalarType::Float) {
    fail(op, "scores", "float32", dtype_text(scores.scalar_type()));
  }
  if (scores.size(1) == 0) fail(op, "scores", "of at least one token", shape_text(scores.sizes()));
  return static_cast<const float*>(scores.const_data_ptr());
}

Tensor choose(const Tensor& scores, ChoiceTask task) {
  task.columns = scores.size(1);
  const Tensor tokens = torch::stable::new_empty(scores, {scores.size(0)}, ScalarType::Long);
  task.tokens = static_cast<int64_t*>(tokens.mutable_data_ptr());
  const KernelSet& kernels = cpu_kernels();
  torch::stable::parallel_for(
      0, scores.size(0), 1,
      [&](int64_t begin, int64_t end) { kernels.choose(task, begin, end); });
  return tokens;
}

}  // namespace

Tensor argmax_rows(Tensor scores) {
  ChoiceTask task{};
  task.scores = checked_scores("argmax_rows", scores);
  return choose(scores, task);
}

Tensor sample_gumbel(Tensor scores, Tensor keys) {
  const char* op = "sample_gumbel";
  ChoiceTask task{};
  task.scores = checked_scores(op, scores);
  task.keys = checked_integers(op, "keys", keys, "[rows]", scores.size(0));
  return choose(scores, task);
}

std::tuple<Tensor, Tensor> draw_rows(Tensor scores, std::optional<Tensor> keys,
                                     std::optional<Tensor> token_ids, int64_t,
                                     double temperature) {
  const char* op = "draw_rows";
  DrawTask task{};
  task.scores = checked_scores(op, scores);
  task.columns = scores.size(1);
  const int64_t rows = scores.size(0);
  if (keys.has_value()) task.keys = checked_integers(op, "keys", *keys, "[rows]", rows);
  if (token_ids.has_value()) {
    task.token_ids = checked_integers(op, "token_ids", *token_ids, "[columns]", task.columns);
  }
  if (!(temperature > 0)) fail(op, "temperature", "above 0", std::to_string(temperature));
  task.temperature = static_cast<float>(temperature);
  Tensor tokens = torch::stable::new_empty(scores, {rows}, ScalarType::Long);
  Tensor likelihoods = torch::stable::new_empty(scores, {rows});
  task.tokens = static_cast<int64_t*>(tokens.mutable_data_ptr());
  task.likelihoods = static_cast<float*>(likelihoods.mutable_data_ptr());
  const Buffer weights = aligned_buffer(rows * task.columns);
  task.weights = weights.get();
  const KernelSet& kernels = cpu_kernels();
  torch::stable::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    kernels.draw(task, begin, end);
  });
  return {tokens, likelihoods};
}

}  // namespace quantkit
