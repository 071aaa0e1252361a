// y = activation((a @ weight.T) * a_scale * weight_scale + bias), both operands in E4M3: choice of
// the kernel, and launch. The kernels are in scaled_mm_*_sm*.cu; those of scaled_gated_mm, which
// multiplies one half of y by the other, in gated_mm_*_sm*.cu; those of block_scaled_mm, whose
// scales change along K, in block_scaled_mm_*_sm*.cu.

#include "ops.h"
#include "scaled_mm_call.h"
#include "scaled_mm_dispatch.h"
#include "scaled_mm_kernels.h"

namespace quantkit::cuda {
namespace {

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

void check_sm90(const char* op, const DeviceProperties& device) {
  if (device.architecture != 90) {
    fail(op, "the GPU", "of compute capability 9.0", capability_text(device));
  }
}

ScaledMmKernel block_kernel(const char* op, const DeviceProperties& device) {
  check_sm90(op, device);
#ifdef QK_HAS_SM90A
  return block_scaled_mm_128x128x128_sm90a();
#else
  return built_kernel(op, device, std::nullopt);
#endif
}

ScaledMmKernel gated_kernel(const char* op, const DeviceProperties& device, int64_t m) {
  check_sm90(op, device);
#ifdef QK_HAS_SM90A
  return m <= kGatedSwapRows ? gated_mm_swap_64x64x256_sm90a()
                             : gated_mm_128x128x128_pingpong_sm90a();
#else
  return built_kernel(op, device, std::nullopt);
#endif
}

// Runs a kernel, in memory of its own where it needs some.
void run_kernel(const ScaledMmCall& call, const ScaledMmKernel& kernel,
                const ScaledMmProblem& problem, const Launch& launch) {
  const auto bytes = static_cast<int64_t>(kernel.workspace_size(problem));
  void* workspace = nullptr;
  std::optional<Tensor> memory;
  if (bytes > 0) {
    memory = torch::stable::new_empty(call.a, {bytes}, ScalarType::Byte);
    workspace = memory->mutable_data_ptr();
  }
  const char* error = kernel.run(problem, workspace, launch.stream());
  if (error != nullptr) throw std::runtime_error(std::string(call.op) + ": CUTLASS: " + error);
}

// The result, [M, columns], of a call whose operands and scales are checked. `choose` returns the
// kernel for a device.
template <class Choose>
Tensor multiply(const ScaledMmCall& call, int64_t columns, int activation, const Choose& choose) {
  const Launch launch = launch_on(call.op, call.a,
                                  {{"a_scale", call.a_scale},
                                   {"weight", call.weight},
                                   {"weight_scale", call.weight_scale},
                                   {"bias", call.bias}});
  const std::optional<Tensor> bias = float_bias(call);
  Tensor out = torch::stable::new_empty(call.a, {call.m(), columns}, call.dtype);
  if (call.m() == 0 || call.n() == 0) return out;

  const DeviceProperties& device = launch.properties();
  const ScaledMmKernel kernel = choose(device);
  const ScaledMmProblem problem{
      .a = call.a.const_data_ptr(),
      .a_scale = data<float>(call.a_scale),
      .weight = call.weight.const_data_ptr(),
      .weight_scale = data<float>(call.weight_scale),
      .bias = data<float>(bias),
      .out = out.mutable_data_ptr(),
      .m = call.m(),
      .n = call.n(),
      .k = call.k(),
      .a_scale_per_row = call.a_scale.numel() != 1,
      .half_out = call.dtype == ScalarType::Half,
      .activation = activation,
      .device = launch.device(),
      .multiprocessors = device.multiprocessors,
      .band = scaled_mm_band(call.m(), call.n()),
  };
  run_kernel(call, kernel, problem, launch);
  return out;
}

Tensor scale_rows(const ScaledMmCall& call, const std::string& activation,
                  const std::string* tile) {
  check_operands(call);
  check_row_scales(call);
  return multiply(call, call.n(), activation_kind(call.op, activation),
                  [&](const DeviceProperties& device) {
                    return choose_kernel(call.op, device, call.m(), call.n(), tile);
                  });
}

}  // namespace

Tensor scaled_mm(Tensor a, Tensor a_scale, Tensor weight, Tensor weight_scale,
                 std::optional<Tensor> bias, ScalarType dtype, std::string activation) {
  return scale_rows({"scaled_mm", a, a_scale, weight, weight_scale, bias, dtype}, activation,
                   nullptr);
}

// The same by a named tile of scaled_mm_dispatch.h: for tests, and for measuring the table.
Tensor scaled_mm_tile(Tensor a, Tensor a_scale, Tensor weight, Tensor weight_scale,
                      std::optional<Tensor> bias, ScalarType dtype, std::string activation,
                      std::string tile) {
  return scale_rows({"scaled_mm_tile", a, a_scale, weight, weight_scale, bias, dtype}, activation,
                   &tile);
}

// activation(gate) * up, where the weight is rows of gate, then as many of up: [M, N / 2].
Tensor scaled_gated_mm(Tensor a, Tensor a_scale, Tensor weight, Tensor weight_scale,
                       std::optional<Tensor> bias, ScalarType dtype, std::string activation) {
  const ScaledMmCall call{"scaled_gated_mm", a, a_scale, weight, weight_scale, bias, dtype};
  check_operands(call);
  check_row_scales(call);
  return multiply(call, call.n() / 2, activation_kind(call.op, activation),
                  [&](const DeviceProperties& device) {
                    return gated_kernel(call.op, device, call.m());
                  });
}

// Scales that change along K: weight_scale [N / 128, K / 128], each for a block of 128 rows and
// columns; a_scale [K / 128, M rounded up to 4], each for 128 columns of a row of a.
Tensor block_scaled_mm(Tensor a, Tensor a_scale, Tensor weight, Tensor weight_scale,
                       std::optional<Tensor> bias, ScalarType dtype) {
  const ScaledMmCall call{"block_scaled_mm", a, a_scale, weight, weight_scale, bias, dtype};
  check_operands(call);
  check_block_scales(call);
  return multiply(call, call.n(), kNoActivation, [&](const DeviceProperties& device) {
    return block_kernel(call.op, device);
  });
}

}  // namespace quantkit::cuda
