// The CUDA ops. Schemas, shapes and meaning are in Python, beside their reference kernels.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>

namespace quantkit::cuda {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// weight_linear.cu, dequantize.cu
Tensor fp8_linear(Tensor x, Tensor weight, Tensor weight_scale, std::optional<Tensor> bias,
                  int64_t group_size, std::optional<ScalarType> dtype,
                  std::optional<Tensor> outlier_columns, std::optional<Tensor> outlier_weight);
Tensor fp8_gated_linear(Tensor x, Tensor weight, Tensor weight_scale, std::optional<Tensor> bias,
                        int64_t group_size, std::string activation,
                        std::optional<Tensor> outlier_columns, std::optional<Tensor> outlier_weight);
Tensor dequantize_weight(Tensor weight, Tensor weight_scale, int64_t group_size, ScalarType dtype);

// scaled_mm.cu
Tensor scaled_mm(Tensor a, Tensor a_scale, Tensor weight, Tensor weight_scale,
                 std::optional<Tensor> bias, ScalarType dtype, std::string activation);
Tensor scaled_mm_tile(Tensor a, Tensor a_scale, Tensor weight, Tensor weight_scale,
                      std::optional<Tensor> bias, ScalarType dtype, std::string activation,
                      std::string tile);
Tensor scaled_gated_mm(Tensor a, Tensor a_scale, Tensor weight, Tensor weight_scale,
                       std::optional<Tensor> bias, ScalarType dtype, std::string activation);
Tensor block_scaled_mm(Tensor a, Tensor a_scale, Tensor weight, Tensor weight_scale,
                       std::optional<Tensor> bias, ScalarType dtype);

// rows.cu
Tensor rms_norm(Tensor x, Tensor weight, double eps);
std::tuple<Tensor, Tensor> add_rms_norm(Tensor x, Tensor delta, Tensor weight, double eps);
std::tuple<Tensor, Tensor> rms_norm_quantize(Tensor x, Tensor weight, double eps,
                                             std::optional<Tensor> scale);
std::tuple<Tensor, Tensor, Tensor> add_rms_norm_quantize(Tensor x, Tensor delta, Tensor weight,
                                                         double eps, std::optional<Tensor> scale);
std::tuple<Tensor, Tensor> quantize_rows(Tensor x, std::optional<Tensor> scale);
Tensor gate_mul(Tensor both, std::string activation);
std::tuple<Tensor, Tensor> gate_mul_quantize(Tensor both, std::string activation,
                                             std::optional<Tensor> scale);
Tensor rotary(Tensor x, Tensor cos, Tensor sin);

// kv_cache.cu
void kv_append(Tensor key, Tensor value, Tensor k_cache, Tensor v_cache,
               std::optional<Tensor> k_scale, std::optional<Tensor> v_scale, Tensor slots);
Tensor rotary_append(Tensor qkv, std::optional<Tensor> q_norm, std::optional<Tensor> k_norm,
                     double eps, std::optional<Tensor> cos, std::optional<Tensor> sin,
                     Tensor k_cache, Tensor v_cache, std::optional<Tensor> k_scale,
                     std::optional<Tensor> v_scale, Tensor slots, int64_t heads);
Tensor kv_gather(Tensor cache, std::optional<Tensor> scale, Tensor blocks, int64_t length,
                 ScalarType dtype);

// qkv_linear.cu
Tensor fp8_qkv_append(Tensor x, Tensor weight, Tensor weight_scale, std::optional<Tensor> bias,
                      int64_t group_size, std::optional<Tensor> cos, std::optional<Tensor> sin,
                      Tensor k_cache, Tensor v_cache, std::optional<Tensor> k_scale,
                      std::optional<Tensor> v_scale, Tensor slots, int64_t heads);

// attention.cu
Tensor paged_attention(Tensor query, Tensor k_cache, Tensor v_cache, std::optional<Tensor> k_scale,
                       std::optional<Tensor> v_scale, Tensor block_tables, Tensor lengths,
                       Tensor query_starts, double softmax_scale,
                       std::optional<int64_t> sliding_window, std::optional<double> softcap);

// sampling.cu
Tensor argmax_rows(Tensor scores);
Tensor sample_gumbel(Tensor scores, Tensor keys);
Tensor nucleus_bound(Tensor probabilities, double top_p);

}  // namespace quantkit::cuda
