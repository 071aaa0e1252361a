// y = activation((a @ weight.T) * a_scale * weight_scale + bias), both operands in E4M3: argument
// checks, choice of the kernel, launch. The kernels are in scaled_mm_*_sm*.cu. block_scaled_mm is the
// same with scales that change along K, block_scaled_mm_*_sm*.cu.

#include <climits>

#include "checks.h"
#include "ops.h"
#include "scaled_mm_dispatch.h"
#include "scaled_mm_kernels.h"

namespace quantkit::cuda {
namespace {

constexpr int64_t kAlignment = 16;  // bytes; of addresses and, TMA's rule, of rows
constexpr int64_t kScaleBlock = 128;

// The kernel of a tile; none where the library was built without its architecture.
std::optional<ScaledMmKernel> kernel_of(ScaledMmTile tile) {
  switch (tile) {
#ifdef QK_HAS_SM90A
    case ScaledMmTile::kSwap64x16x256Sm90: return scaled_mm_swap_64x16x256_sm90a();
    case ScaledMmTile::kSwap64x32x256Sm90: return scaled_mm_swap_64x32x256_sm90a();
    case ScaledMmTile::kSwap64x64x256Sm90: return scaled_mm_swap_64x64x256_sm90a();
    case ScaledMmTile::k64x128x128Sm90: return scaled_mm_64x128x128_pingpong_sm90a();
    case ScaledMmTile::k128x128x128Sm90: return scaled_mm_128x128x128_pingpong_sm90a();
#endif
#ifdef QK_HAS_SM89
    case ScaledMmTile::k16x64x128Sm89: return scaled_mm_16x64x128_sm89();
    case ScaledMmTile::k64x64x128Sm89: return scaled_mm_64x64x128_sm89();
    case ScaledMmTile::k64x128x128Sm89: return scaled_mm_64x128x128_sm89();
    case ScaledMmTile::k128x128x64Sm89: return scaled_mm_128x128x64_sm89();
#endif
#ifdef QK_HAS_SM100A
    case ScaledMmTile::kSwap128x32x128Sm100: return scaled_mm_swap_128x32x128_sm100a();
    case ScaledMmTile::k128x128x128Sm100: return scaled_mm_128x128x128_sm100a();
    case ScaledMmTile::k256x128x128Sm100: return scaled_mm_256x128x128_sm100a();
#endif
#ifdef QK_HAS_SM120A
    case ScaledMmTile::k64x64x128Sm120: return scaled_mm_64x64x128_sm120a();
    case ScaledMmTile::k128x128x128Sm120: return scaled_mm_128x128x128_sm120a();
#endif
    default: return std::nullopt;
  }
}

int activation_kind(const char* op, const std::string& name) {
  if (name == "none") return kNoActivation;
  if (name == "silu") return static_cast<int>(Activation::kSilu);
  if (name == "gelu") return static_cast<int>(Activation::kGelu);
  if (name == "gelu_tanh") return static_cast<int>(Activation::kGeluTanh);
  if (name == "relu") return static_cast<int>(Activation::kRelu);
  fail(op, "activation", "none, silu, gelu, gelu_tanh or relu", "'" + name + "'");
}

void check_dtype(const char* op, const char* argument, const Tensor& tensor, ScalarType expected) {
  if (tensor.scalar_type() != expected) {
    fail(op, argument, dtype_text(expected), dtype_text(tensor.scalar_type()));
  }
}

void check_aligned(const char* op, const char* argument, const Tensor& tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  if (address % kAlignment != 0) {
    fail(op, argument, "at an address that is a multiple of 16",
         "one " + std::to_string(address % kAlignment) + " bytes above");
  }
}

// One of the two operands: E4M3 codes [rows, K].
void check_codes(const char* op, const char* argument, const Tensor& tensor, const char* letters,
                 int64_t columns) {
  check_dtype(op, argument, tensor, ScalarType::Float8_e4m3fn);
  check_shape(op, argument, tensor, letters, {-1, columns});
  check_layout(op, argument, tensor);
  check_aligned(op, argument, tensor);
}

void check_sizes(const char* op, const Tensor& a, const Tensor& weight) {
  if (weight.size(0) % 16 != 0 || weight.size(1) % 16 != 0 || weight.size(1) == 0) {
    fail(op, "weight", "of sizes that are multiples of 16", shape_text(weight.sizes()));
  }
  if (a.size(0) > INT_MAX - 256 || weight.size(0) > INT_MAX - 256) {
    fail(op, "a", "of less than 2^31 rows, and weight too", shape_text(a.sizes()));
  }
}

void check_scales(const char* op, const Tensor& a_scale, const Tensor& weight_scale, int64_t m,
                  int64_t n) {
  check_dtype(op, "a_scale", a_scale, ScalarType::Float);
  if (a_scale.dim() != 1 || a_scale.size(0) != 1) {
    check_shape(op, "a_scale", a_scale, "[M] or [1], [M]", {m});
  }
  check_layout(op, "a_scale", a_scale);
  check_dtype(op, "weight_scale", weight_scale, ScalarType::Float);
  check_shape(op, "weight_scale", weight_scale, "[N]", {n});
  check_layout(op, "weight_scale", weight_scale);
  check_aligned(op, "weight_scale", weight_scale);
}

// The bias as the kernels read it, float32: itself, or, with one small kernel more, converted.
std::optional<Tensor> float_bias(const char* op, const std::optional<Tensor>& bias, int64_t n) {
  if (!bias.has_value()) return std::nullopt;
  const FloatType type = float_type(op, "bias", bias->scalar_type());
  check_shape(op, "bias", *bias, "[N]", {n});
  check_layout(op, "bias", *bias);
  if (type != FloatType::kFloat32) return torch::stable::to(*bias, ScalarType::Float);
  check_aligned(op, "bias", *bias);
  return bias;
}

const ScaledMmTileShape& named_tile(const char* op, int architecture, const std::string& name) {
  std::string names;
  for (const ScaledMmTileShape& shape : kScaledMmTiles) {
    if (shape.architecture != architecture) continue;
    if (name == shape.name) return shape;
    names += (names.empty() ? "" : ", ") + std::string(shape.name);
  }
  fail(op, "tile", "one of " + names, "'" + name + "'");
}

std::string capability_text(const DeviceProperties& device) {
  return "compute capability " + std::to_string(device.architecture / 10) + "." +
         std::to_string(device.architecture % 10);
}

// The kernel, or, where there is none, the reason.
ScaledMmKernel built_kernel(const char* op, const DeviceProperties& device,
                            const std::optional<ScaledMmKernel>& kernel) {
  if (!kernel.has_value()) {
    fail(op, "the GPU", "one that this library was built for (see QUANTKIT_CUDA_ARCHS)",
         capability_text(device));
  }
  return *kernel;
}

ScaledMmKernel choose_kernel(const char* op, const DeviceProperties& device, int64_t m, int64_t n,
                             const std::string* tile) {
  const ScaledMmTileShape* shape =
      tile != nullptr ? &named_tile(op, device.architecture, *tile)
                      : choose_scaled_mm_tile(device.architecture, device.multiprocessors, m, n);
  if (shape == nullptr) {
    fail(op, "the GPU", "of compute capability 8.9, 9.0, 10.0 or 12.0 (FP8 matrix instructions)",
         capability_text(device));
  }
  return built_kernel(op, device, kernel_of(shape->tile));
}

ScaledMmKernel block_kernel(const char* op, const DeviceProperties& device) {
  if (device.architecture != 90) {
    fail(op, "the GPU", "of compute capability 9.0", capability_text(device));
  }
#ifdef QK_HAS_SM90A
  return block_scaled_mm_128x128x128_sm90a();
#else
  return built_kernel(op, device, std::nullopt);
#endif
}

// Runs a kernel, in memory of its own where it needs some.
void run_kernel(const char* op, const ScaledMmKernel& kernel, const ScaledMmProblem& problem,
                const Launch& launch, const Tensor& a) {
  const auto bytes = static_cast<int64_t>(kernel.workspace_size(problem));
  void* workspace = nullptr;
  std::optional<Tensor> memory;
  if (bytes > 0) {
    memory = torch::stable::new_empty(a, {bytes}, ScalarType::Byte);
    workspace = memory->mutable_data_ptr();
  }
  const char* error = kernel.run(problem, workspace, launch.stream());
  if (error != nullptr) throw std::runtime_error(std::string(op) + ": CUTLASS: " + error);
}

void check_out_dtype(const char* op, ScalarType dtype) {
  if (dtype != ScalarType::BFloat16 && dtype != ScalarType::Half) {
    fail(op, "dtype", "bfloat16 or float16", dtype_text(dtype));
  }
}

Tensor run(const char* op, const Tensor& a, const Tensor& a_scale, const Tensor& weight,
           const Tensor& weight_scale, const std::optional<Tensor>& bias, ScalarType dtype,
           const std::string& activation, const std::string* tile) {
  check_codes(op, "weight", weight, "[N, K]", -1);
  const int64_t n = weight.size(0);
  const int64_t k = weight.size(1);
  check_codes(op, "a", a, "[M, K]", k);
  const int64_t m = a.size(0);
  check_sizes(op, a, weight);
  check_scales(op, a_scale, weight_scale, m, n);
  const int kind = activation_kind(op, activation);
  check_out_dtype(op, dtype);
  const Launch launch = launch_on(
      op, a,
      {{"a_scale", a_scale}, {"weight", weight}, {"weight_scale", weight_scale}, {"bias", bias}});
  const std::optional<Tensor> shift = float_bias(op, bias, n);
  Tensor out = torch::stable::new_empty(a, {m, n}, dtype);
  if (m == 0 || n == 0) return out;

  const DeviceProperties& device = launch.properties();
  const ScaledMmKernel kernel = choose_kernel(op, device, m, n, tile);
  const ScaledMmProblem problem{.a = a.const_data_ptr(),
                                .a_scale = data<float>(a_scale),
                                .weight = weight.const_data_ptr(),
                                .weight_scale = data<float>(weight_scale),
                                .bias = data<float>(shift),
                                .out = out.mutable_data_ptr(),
                                .m = m,
                                .n = n,
                                .k = k,
                                .a_scale_per_row = a_scale.size(0) != 1,
                                .half_out = dtype == ScalarType::Half,
                                .activation = kind,
                                .device = launch.device(),
                                .multiprocessors = device.multiprocessors,
                                .band = scaled_mm_band(m, n)};
  run_kernel(op, kernel, problem, launch, a);
  return out;
}

}  // namespace

Tensor scaled_mm(Tensor a, Tensor a_scale, Tensor weight, Tensor weight_scale,
                 std::optional<Tensor> bias, ScalarType dtype, std::string activation) {
  return run("scaled_mm", a, a_scale, weight, weight_scale, bias, dtype, activation, nullptr);
}

// The same by a named tile of scaled_mm_dispatch.h: for tests, and for measuring the table.
Tensor scaled_mm_tile(Tensor a, Tensor a_scale, Tensor weight, Tensor weight_scale,
                      std::optional<Tensor> bias, ScalarType dtype, std::string activation,
                      std::string tile) {
  return run("scaled_mm_tile", a, a_scale, weight, weight_scale, bias, dtype, activation, &tile);
}

// The same with scales that change along K: weight_scale [N / 128, K / 128], each for a block of 128
// rows and columns; a_scale [K / 128, M rounded up to 4], each for 128 columns of a row of a.
Tensor block_scaled_mm(Tensor a, Tensor a_scale, Tensor weight, Tensor weight_scale,
                       std::optional<Tensor> bias, ScalarType dtype) {
  const char* op = "block_scaled_mm";
  check_codes(op, "weight", weight, "[N, K]", -1);
  const int64_t n = weight.size(0);
  const int64_t k = weight.size(1);
  check_codes(op, "a", a, "[M, K]", k);
  const int64_t m = a.size(0);
  check_sizes(op, a, weight);
  if (k % kScaleBlock != 0) {
    fail(op, "weight", "of K a multiple of 128", shape_text(weight.sizes()));
  }
  check_dtype(op, "a_scale", a_scale, ScalarType::Float);
  check_shape(op, "a_scale", a_scale, "[K / 128, M rounded up to 4]",
              {k / kScaleBlock, (m + 3) / 4 * 4});
  check_layout(op, "a_scale", a_scale);
  check_aligned(op, "a_scale", a_scale);
  check_dtype(op, "weight_scale", weight_scale, ScalarType::Float);
  check_shape(op, "weight_scale", weight_scale, "[ceil(N / 128), K / 128]",
              {(n + kScaleBlock - 1) / kScaleBlock, k / kScaleBlock});
  check_layout(op, "weight_scale", weight_scale);
  check_out_dtype(op, dtype);
  const Launch launch = launch_on(
      op, a,
      {{"a_scale", a_scale}, {"weight", weight}, {"weight_scale", weight_scale}, {"bias", bias}});
  const std::optional<Tensor> shift = float_bias(op, bias, n);
  Tensor out = torch::stable::new_empty(a, {m, n}, dtype);
  if (m == 0 || n == 0) return out;
  const DeviceProperties& device = launch.properties();
  const ScaledMmProblem problem{.a = a.const_data_ptr(),
                                .a_scale = data<float>(a_scale),
                                .weight = weight.const_data_ptr(),
                                .weight_scale = data<float>(weight_scale),
                                .bias = data<float>(shift),
                                .out = out.mutable_data_ptr(),
                                .m = m,
                                .n = n,
                                .k = k,
                                .a_scale_per_row = false,
                                .half_out = dtype == ScalarType::Half,
                                .activation = kNoActivation,
                                .device = launch.device(),
                                .multiprocessors = device.multiprocessors,
                                .band = scaled_mm_band(m, n)};
  run_kernel(op, block_kernel(op, device), problem, launch, a);
  return out;
}

}  // namespace quantkit::cuda
