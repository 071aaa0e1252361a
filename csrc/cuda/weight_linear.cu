// fp8_linear and fp8_gated_linear: checks, and the kernels of the weight's format.

#include "checks.h"
#include "ops.h"
#include "weight_linear.h"

namespace quantkit::cuda {
namespace {

Tensor run(const char* op, const Tensor& x, const Tensor& weight, const Tensor& weight_scale,
           const std::optional<Tensor>& bias, int64_t group_size,
           const std::optional<Tensor>& outlier_columns,
           const std::optional<Tensor>& outlier_weight, bool gated, Activation activation) {
  const WeightMatrix matrix = weight_matrix(op, weight, weight_scale, group_size);
  const FloatType x_type = half_type(op, x);
  check_shape(op, "x", x, "[M, K]", {-1, matrix.columns});
  check_layout(op, "x", x);
  if (gated && matrix.rows % 2 != 0) {
    fail(op, "weight", "gate rows then as many up rows", shape_text(weight.sizes()));
  }
  LinearCall call{.x = x.const_data_ptr(),
                  .codes = matrix.codes,
                  .scale = matrix.scale,
                  .tokens = x.size(0),
                  .columns = matrix.columns,
                  .features = gated ? matrix.rows / 2 : matrix.rows,
                  .groups = matrix.groups,
                  .group_size = matrix.group_size,
                  .outliers = outlier_matrix(op, outlier_columns, outlier_weight, matrix.rows),
                  .activation = activation};
  if (bias.has_value()) {
    call.bias_type = float_type(op, "bias", bias->scalar_type());
    check_shape(op, "bias", *bias, "[N]", {matrix.rows});
    check_layout(op, "bias", *bias);
    call.bias = bias->const_data_ptr();
  }
  const Launch launch = launch_on(op, x,
                                  {{"weight", weight},
                                   {"weight_scale", weight_scale},
                                   {"bias", bias},
                                   {"outlier_columns", outlier_columns},
                                   {"outlier_weight", outlier_weight}});
  Tensor out = torch::stable::new_empty(x, {call.tokens, call.features});
  call.out = out.mutable_data_ptr();
  const bool overlap = launch.properties().architecture >= 90;
  with_code_format(op, weight.scalar_type(), [&](auto format) {
    launch_weight_linear<decltype(format)>(call, x_type, gated, launch.stream(), overlap);
  });
  launch.check();
  return out;
}

}  // namespace

Tensor fp8_linear(Tensor x, Tensor weight, Tensor weight_scale, std::optional<Tensor> bias,
                  int64_t group_size, std::optional<ScalarType> dtype,
                  std::optional<Tensor> outlier_columns, std::optional<Tensor> outlier_weight) {
  if (dtype.has_value()) {
    fail("fp8_linear", "dtype", "not given on a GPU", "one");
  }
  return run("fp8_linear", x, weight, weight_scale, bias, group_size, outlier_columns,
             outlier_weight, false, Activation::kRelu);
}

Tensor fp8_gated_linear(Tensor x, Tensor weight, Tensor weight_scale, std::optional<Tensor> bias,
                        int64_t group_size, std::string activation,
                        std::optional<Tensor> outlier_columns,
                        std::optional<Tensor> outlier_weight) {
  const char* op = "fp8_gated_linear";
  return run(op, x, weight, weight_scale, bias, group_size, outlier_columns, outlier_weight, true,
             activation_named(op, activation));
}

}  // namespace quantkit::cuda
