// rms_norm, add_rms_norm, gate_mul and rotary: checks and threads.

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

// The task of normalizing x; the caller adds where results go.
NormTask norm_task(const char* op, const Tensor& x, const Tensor& weight, double eps) {
  NormTask task{};
  task.type = float_type(op, "x", x.scalar_type());
  if (x.dim() < 1) fail(op, "x", "of shape [..., features]", shape_text(x.sizes()));
  check_layout(op, "x", x);
  task.columns = x.size(x.dim() - 1);
  check_shape(op, "weight", weight, "[features]", {task.columns});
  check_layout(op, "weight", weight);
  task.weight_type = float_type(op, "weight", weight.scalar_type());
  if (task.weight_type != FloatType::kFloat32) check_same_dtype(op, "weight", weight, x);
  task.x = x.const_data_ptr();
  task.weight = weight.const_data_ptr();
  task.eps = static_cast<float>(eps);
  return task;
}

void run_norm(const NormTask& task, int64_t elements) {
  if (elements == 0) return;
  const KernelSet& kernels = cpu_kernels();
  torch::stable::parallel_for(
      0, elements / task.columns, grain_of(task.columns),
      [&](int64_t begin, int64_t end) { kernels.rms_norm(task, begin, end); });
}

}  // namespace

Tensor rms_norm(Tensor x, Tensor weight, double eps) {
  NormTask task = norm_task("rms_norm", x, weight, eps);
  Tensor out = torch::stable::new_empty(x, x.sizes());
  task.out = out.mutable_data_ptr();
  run_norm(task, out.numel());
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(Tensor x, Tensor delta, Tensor weight, double eps) {
  const char* op = "add_rms_norm";
  NormTask task = norm_task(op, x, weight, eps);
  check_shape(op, "x", x, "[num_tokens, features]", {-1, -1});
  check_shape(op, "delta", delta, "[num_tokens, features]", {x.size(0), x.size(1)});
  check_layout(op, "delta", delta);
  check_same_dtype(op, "delta", delta, x);
  Tensor total = torch::stable::new_empty(x, x.sizes());
  Tensor out = torch::stable::new_empty(x, x.sizes());
  task.delta = delta.const_data_ptr();
  task.sum = total.mutable_data_ptr();
  task.out = out.mutable_data_ptr();
  run_norm(task, out.numel());
  return {total, out};
}

Tensor gate_mul(Tensor both, std::string activation) {
  const char* op = "gate_mul";
  GateTask task{};
  task.type = float_type(op, "both", both.scalar_type());
  check_shape(op, "both", both, "[num_tokens, 2 * intermediate]", {-1, -1});
  check_layout(op, "both", both);
  if (both.size(1) % 2 != 0) {
    fail(op, "both", "gate columns then as many up columns", shape_text(both.sizes()));
  }
  task.features = both.size(1) / 2;
  task.activation = activation_named(op, activation);
  Tensor out = torch::stable::new_empty(both, {both.size(0), task.features});
  if (out.numel() == 0) return out;
  task.both = both.const_data_ptr();
  task.out = out.mutable_data_ptr();
  const KernelSet& kernels = cpu_kernels();
  torch::stable::parallel_for(0, both.size(0), grain_of(task.features),
                              [&](int64_t begin, int64_t end) { kernels.gate(task, begin, end); });
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
  check_shape(op, "cos", cos, "[num_tokens, rotary_dim]", {tokens, -1});
  task.turned = checked_angles(op, cos, sin, task.head_dim, x);
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
