// rms_norm and rotary: checks and threads.

#include <algorithm>

#include "checks.h"
#include "ops.h"

namespace quantkit {
namespace {

// Elements below which a second thread costs more than it brings.
constexpr int64_t kElementsPerThread = 32 * 1024;

int64_t grain_of(int64_t columns) {
  return std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, columns));
}

}  // namespace

Tensor rms_norm(Tensor x, Tensor weight, double eps) {
  const char* op = "rms_norm";
  NormTask task{};
  task.type = float_type(op, "x", x.scalar_type());
  if (x.dim() < 1) fail(op, "x", "of shape [..., features]", shape_text(x.sizes()));
  check_layout(op, "x", x);
  task.columns = x.size(x.dim() - 1);
  check_shape(op, "weight", weight, "[features]", {task.columns});
  check_layout(op, "weight", weight);
  check_same_dtype(op, "weight", weight, x);
  Tensor out = torch::stable::new_empty(x, x.sizes());
  if (out.numel() == 0) return out;
  task.x = x.const_data_ptr();
  task.weight = weight.const_data_ptr();
  task.out = out.mutable_data_ptr();
  task.eps = static_cast<float>(eps);
  const KernelSet& kernels = cpu_kernels();
  const int64_t rows = x.numel() / task.columns;
  torch::stable::parallel_for(0, rows, grain_of(task.columns), [&](int64_t begin, int64_t end) {
    kernels.rms_norm(task, begin, end);
  });
  return out;
}

Tensor rotary(Tensor x, Tensor cos, Tensor sin) {
  const char* op = "rotary";
  RotaryTask task{};
  task.type = float_type(op, "x", x.scalar_type());
  check_shape(op, "x", x, "[num_tokens, heads, head_dim]", {-1, -1, -1});
  check_rows(op, "x", x);
  const int64_t tokens = x.size(0);
  task.heads = x.size(1);
  task.head_dim = x.size(2);
  if (task.head_dim % 2 != 0) fail(op, "x", "of even head_dim", shape_text(x.sizes()));
  for (const auto& [name, angles] : {std::pair{"cos", cos}, std::pair{"sin", sin}}) {
    check_shape(op, name, angles, "[num_tokens, head_dim]", {tokens, task.head_dim});
    check_layout(op, name, angles);
    check_same_dtype(op, name, angles, x);
  }
  Tensor out = torch::stable::new_empty(x, x.sizes());
  if (out.numel() == 0) return out;
  task.x = x.const_data_ptr();
  task.out = out.mutable_data_ptr();
  task.cosine = cos.const_data_ptr();
  task.sine = sin.const_data_ptr();
  task.x_stride = x.stride(0);
  task.out_stride = task.heads * task.head_dim;
  const KernelSet& kernels = cpu_kernels();
  torch::stable::parallel_for(
      0, tokens, grain_of(task.out_stride),
      [&](int64_t begin, int64_t end) { kernels.rotary(task, begin, end); });
  return out;
}

}  // namespace quantkit
