// argmax_rows and sample_gumbel: checks and launches.

#include "checks.h"
#include "launch_overlapped.h"
#include "ops.h"
#include "sampling.cuh"

namespace quantkit::cuda {
namespace {

Tensor choose(const char* op, const Tensor& scores, const std::optional<Tensor>& keys) {
  check_shape(op, "scores", scores, "[rows, vocab]", {-1, -1});
  check_layout(op, "scores", scores);
  if (scores.scalar_type() != ScalarType::Float) {
    fail(op, "scores", "float32", dtype_text(scores.scalar_type()));
  }
  const int64_t rows = scores.size(0);
  const int64_t columns = scores.size(1);
  if (columns == 0) fail(op, "scores", "of at least one token", shape_text(scores.sizes()));
  if (keys.has_value()) {
    check_shape(op, "keys", *keys, "[rows]", {rows});
    check_layout(op, "keys", *keys);
    if (keys->scalar_type() != ScalarType::Long) {
      fail(op, "keys", "int64", dtype_text(keys->scalar_type()));
    }
  }
  const Launch launch = launch_on(op, scores, {{"keys", keys}});
  const Tensor tokens = torch::stable::new_empty(scores, {rows}, ScalarType::Long);
  if (rows == 0) return tokens;
  const unsigned parts = choice_parts(columns);
  const unsigned blocks = static_cast<unsigned>(rows) * parts;
  // Two 8-byte words for each Choice.
  const Tensor choices = torch::stable::new_empty(scores, {blocks, 2}, ScalarType::Long);
  const bool overlap = launch.properties().architecture >= 90;
  launch_overlapped(overlap, keys.has_value() ? &choose_in_parts<true> : &choose_in_parts<false>,
                    dim3(blocks), kChoiceThreads, 0, launch.stream(), data<float>(scores),
                    data<int64_t>(keys), mutable_data<Choice>(choices), columns, parts);
  launch.check();
  launch_overlapped(overlap, &choose_of_parts, dim3(static_cast<unsigned>(rows)), kWarp, 0,
                    launch.stream(), data<Choice>(choices), mutable_data<int64_t>(tokens), parts);
  launch.check();
  return tokens;
}

}  // namespace

Tensor argmax_rows(Tensor scores) { return choose("argmax_rows", scores, std::nullopt); }

Tensor sample_gumbel(Tensor scores, Tensor keys) { return choose("sample_gumbel", scores, keys); }

}  // namespace quantkit::cuda
