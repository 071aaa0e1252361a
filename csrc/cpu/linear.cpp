// fp8_linear and fp8_gated_linear: checks, packing of x, threads. The arithmetic is in
// kernel_template.h.

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "checks.h"
#include "ops.h"

namespace quantkit {
namespace {

// Weight bytes below which a second thread costs more than it brings.
constexpr int64_t kBytesPerThread = 128 * 1024;

struct Free {
  void operator()(float* pointer) const { std::free(pointer); }
};
using Buffer = std::unique_ptr<float, Free>;

Buffer aligned_buffer(int64_t count) {
  const size_t bytes = (static_cast<size_t>(count) * sizeof(float) + 63) / 64 * 64;
  void* pointer = std::aligned_alloc(64, bytes == 0 ? 64 : bytes);
  if (pointer == nullptr) throw std::bad_alloc();
  return Buffer(static_cast<float*>(pointer));
}

LinearTask linear_task(const char* op, const Tensor& x, const WeightMatrix& weight,
                       const std::optional<Tensor>& bias) {
  LinearTask task{};
  task.weight = weight;
  task.out_type = float_type(op, "x", x.scalar_type());
  check_shape(op, "x", x, "[M, K]", {-1, weight.columns});
  check_layout(op, "x", x);
  if (bias.has_value()) {
    task.bias_type = float_type(op, "bias", bias->scalar_type());
    check_shape(op, "bias", *bias, "[N]", {weight.rows});
    check_layout(op, "bias", *bias);
    task.bias = bias->const_data_ptr();
  }
  return task;
}

using Kernel = void (*)(const LinearTask&, int64_t begin, int64_t end);

// Runs `kernel` over all rows of x, KernelSet::max_batch at a time, its features split over
// threads.
Tensor run(LinearTask task, const Tensor& x, int64_t features, const KernelSet& kernels,
           Kernel kernel) {
  const int64_t batch = x.size(0);
  const int64_t columns = x.size(1);
  const int64_t item = task.out_type == FloatType::kFloat32 ? 4 : 2;
  Tensor out = torch::stable::new_empty(x, {batch, features});
  if (batch == 0 || features == 0) return out;

  const auto* x_data = static_cast<const char*>(x.const_data_ptr());
  auto* out_data = static_cast<char*>(out.mutable_data_ptr());
  const int64_t units = (features + kRowsPerUnit - 1) / kRowsPerUnit;
  const int64_t unit_bytes = task.weight.rows * columns / units + 1;
  const int64_t grain = (kBytesPerThread + unit_bytes - 1) / unit_bytes;
  task.features = features;
  Buffer packed;
  for (int64_t row = 0; row < batch; row += kernels.max_batch) {
    task.batch = static_cast<int>(std::min<int64_t>(kernels.max_batch, batch - row));
    const PackTask pack{.x = x_data + row * columns * item,
                        .type = task.out_type,
                        .batch = task.batch,
                        .columns = columns,
                        .group_size = task.weight.group_size};
    if (packed == nullptr) packed = aligned_buffer(kernels.packed_size(pack));
    kernels.pack(pack, packed.get());
    task.x = packed.get();
    task.out = out_data + row * features * item;
    torch::stable::parallel_for(0, units, grain, [&](int64_t begin, int64_t end) {
      kernel(task, begin * kRowsPerUnit, std::min(end * kRowsPerUnit, features));
    });
  }
  return out;
}

Activation activation_named(const char* op, const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "relu") return Activation::kRelu;
  fail(op, "activation", "silu, gelu, gelu_tanh or relu", "'" + name + "'");
}

}  // namespace

Tensor fp8_linear(Tensor x, Tensor weight, Tensor weight_scale, std::optional<Tensor> bias,
                  int64_t group_size) {
  const char* op = "fp8_linear";
  const WeightMatrix matrix = weight_matrix(op, weight, weight_scale, group_size);
  const LinearTask task = linear_task(op, x, matrix, bias);
  const KernelSet& kernels = cpu_kernels();
  return run(task, x, matrix.rows, kernels, kernels.linear);
}

Tensor fp8_gated_linear(Tensor x, Tensor weight, Tensor weight_scale, std::optional<Tensor> bias,
                        int64_t group_size, std::string activation) {
  const char* op = "fp8_gated_linear";
  const WeightMatrix matrix = weight_matrix(op, weight, weight_scale, group_size);
  if (matrix.rows % 2 != 0) {
    fail(op, "weight", "gate rows then as many up rows", shape_text(weight.sizes()));
  }
  LinearTask task = linear_task(op, x, matrix, bias);
  task.activation = activation_named(op, activation);
  const KernelSet& kernels = cpu_kernels();
  return run(task, x, matrix.rows / 2, kernels, kernels.gated_linear);
}

}  // namespace quantkit
