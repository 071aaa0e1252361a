// argmax_rows, sample_gumbel and nucleus_bound: checks and launches.

#include <cmath>

#include "checks.h"
#include "launch_overlapped.h"
#include "ops.h"
#include "sampling.cuh"

namespace quantkit::cuda {
namespace {

void check_scores(const char* op, const char* name, const Tensor& scores) {
  check_shape(op, name, scores, "[rows, vocab]", {-1, -1});
  check_layout(op, name, scores);
  if (scores.scalar_type() != ScalarType::Float) {
    fail(op, name, "float32", dtype_text(scores.scalar_type()));
  }
}

Tensor choose(const char* op, const Tensor& scores, const std::optional<Tensor>& keys) {
  check_scores(op, "scores", scores);
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

Tensor nucleus_bound(Tensor probabilities, double top_p) {
  const char* op = "nucleus_bound";
  check_scores(op, "probabilities", probabilities);
  if (!(top_p >= 0 && top_p <= 1)) fail(op, "top_p", "from 0 to 1", std::to_string(top_p));
  const int64_t rows = probabilities.size(0);
  const Launch launch = launch_on(op, probabilities, {});
  const Tensor bounds = torch::stable::new_empty(probabilities, {rows, 1});
  if (rows == 0) return bounds;
  const auto target = static_cast<uint64_t>(std::ceil(std::ldexp(top_p, kMassBits)));
  launch_overlapped(launch.properties().architecture >= 90, &find_nucleus,
                    dim3(static_cast<unsigned>(rows)), kNucleusThreads, 0, launch.stream(),
                    data<float>(probabilities), mutable_data<float>(bounds), probabilities.size(1),
                    target);
  launch.check();
  return bounds;
}

}  // namespace quantkit::cuda
