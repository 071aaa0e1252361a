// fp8_qkv_append: checks, and the kernels of the weight's format.

#include "qkv_linear.h"

#include "cache_view.h"
#include "checks.h"
#include "ops.h"

namespace quantkit::cuda {

Tensor fp8_qkv_append(Tensor x, Tensor weight, Tensor weight_scale, std::optional<Tensor> bias,
                      int64_t group_size, std::optional<Tensor> cos, std::optional<Tensor> sin,
                      Tensor k_cache, Tensor v_cache, std::optional<Tensor> k_scale,
                      std::optional<Tensor> v_scale, Tensor slots, int64_t heads) {
  const char* op = "fp8_qkv_append";
  const WeightMatrix matrix = weight_matrix(op, weight, weight_scale, group_size);
  const CacheView cache = cache_view(op, k_cache, v_cache, k_scale, v_scale);
  const FloatType x_type = half_type(op, x);
  check_shape(op, "x", x, "[M, K]", {-1, matrix.columns});
  check_layout(op, "x", x);
  if (heads < 0 || (heads + 2 * cache.heads) * cache.head_dim != matrix.rows) {
    fail(op, "heads", "such that weight has the rows of heads + 2 kv_heads of " +
         std::to_string(cache.head_dim), std::to_string(heads));
  }
  const int64_t tokens = x.size(0);
  QkvCall call{.linear = {.x = x.const_data_ptr(),
                          .codes = matrix.codes,
                          .scale = matrix.scale,
                          .tokens = tokens,
                          .columns = matrix.columns,
                          .features = matrix.rows,
                          .groups = matrix.groups,
                          .group_size = matrix.group_size},
               .cosine = address(cos),
               .sine = address(sin),
               .keys = cache.key_side(),
               .values = cache.value_side(),
               .slots = slot_data(op, slots, tokens),
               .slot_count = cache.slots(),
               .heads = static_cast<int>(heads),
               .kv_heads = static_cast<int>(cache.heads),
               .head_dim = static_cast<int>(cache.head_dim),
               .stored = cache.type};
  if (bias.has_value()) {
    call.linear.bias_type = float_type(op, "bias", bias->scalar_type());
    check_shape(op, "bias", *bias, "[N]", {matrix.rows});
    check_layout(op, "bias", *bias);
    call.linear.bias = bias->const_data_ptr();
  }
  check_both(op, "cos", "sin", cos, sin);
  if (cos.has_value()) {
    call.rotary_dim = static_cast<int>(rotary_dim_of(op, *cos, cache.head_dim));
    check_angles(op, "cos", *cos, x, call.rotary_dim);
    check_angles(op, "sin", *sin, x, call.rotary_dim);
  }
  const Launch launch = launch_on(op, x,
                                  {{"weight", weight},
                                   {"weight_scale", weight_scale},
                                   {"bias", bias},
                                   {"cos", cos},
                                   {"sin", sin},
                                   {"k_cache", k_cache},
                                   {"v_cache", v_cache},
                                   {"k_scale", k_scale},
                                   {"v_scale", v_scale},
                                   {"slots", slots}});
  Tensor query = torch::stable::new_empty(x, {tokens, heads, cache.head_dim});
  if (tokens == 0 || matrix.rows == 0) return query;
  call.linear.out = query.mutable_data_ptr();
  const bool overlap = launch.properties().architecture >= 90;
  with_code_format(op, weight.scalar_type(), [&](auto format) {
    if (!launch_qkv_linear<decltype(format)>(call, x_type, launch.stream(), overlap)) {
      fail(op, "its arguments", "of sizes that fits_qkv_linear (qkv_linear_dispatch.h) takes",
           "x " + shape_text(x.sizes()) + ", heads of " + std::to_string(cache.head_dim));
    }
  });
  launch.check();
  return query;
}

}  // namespace quantkit::cuda
