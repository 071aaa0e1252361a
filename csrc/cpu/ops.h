// The CPU ops. Schemas, shapes and meaning: quantkit/ops.py and quantkit/attention_ops.py.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace quantkit {

torch::stable::Tensor fp8_linear(torch::stable::Tensor x, torch::stable::Tensor weight,
                                 torch::stable::Tensor weight_scale,
                                 std::optional<torch::stable::Tensor> bias, int64_t group_size,
                                 std::optional<torch::headeronly::ScalarType> dtype,
                                 std::optional<torch::stable::Tensor> outlier_columns,
                                 std::optional<torch::stable::Tensor> outlier_weight);

torch::stable::Tensor fp8_gated_linear(torch::stable::Tensor x, torch::stable::Tensor weight,
                                       torch::stable::Tensor weight_scale,
                                       std::optional<torch::stable::Tensor> bias,
                                       int64_t group_size, std::string activation,
                                       std::optional<torch::stable::Tensor> outlier_columns,
                                       std::optional<torch::stable::Tensor> outlier_weight);

torch::stable::Tensor linear(torch::stable::Tensor x, torch::stable::Tensor weight,
                             std::optional<torch::stable::Tensor> bias,
                             torch::headeronly::ScalarType dtype);

torch::stable::Tensor gated_linear(torch::stable::Tensor x, torch::stable::Tensor weight,
                                   std::optional<torch::stable::Tensor> bias,
                                   std::string activation);

bool multiplies_many_rows(torch::stable::Tensor x, torch::stable::Tensor weight,
                          int64_t group_size);

torch::stable::Tensor dequantize_weight(torch::stable::Tensor weight,
                                        torch::stable::Tensor weight_scale, int64_t group_size,
                                        torch::headeronly::ScalarType dtype);

torch::stable::Tensor rms_norm(torch::stable::Tensor x, torch::stable::Tensor weight, double eps);

std::tuple<torch::stable::Tensor, torch::stable::Tensor> add_rms_norm(torch::stable::Tensor x,
                                                                      torch::stable::Tensor delta,
                                                                      torch::stable::Tensor weight,
                                                                      double eps);

torch::stable::Tensor gate_mul(torch::stable::Tensor both, std::string activation);

torch::stable::Tensor rotary(torch::stable::Tensor x, torch::stable::Tensor cos,
                             torch::stable::Tensor sin);

void kv_append(torch::stable::Tensor key, torch::stable::Tensor value,
               torch::stable::Tensor k_cache, torch::stable::Tensor v_cache,
               std::optional<torch::stable::Tensor> k_scale,
               std::optional<torch::stable::Tensor> v_scale, torch::stable::Tensor slots);

torch::stable::Tensor paged_attention(torch::stable::Tensor query, torch::stable::Tensor k_cache,
                                      torch::stable::Tensor v_cache,
                                      std::optional<torch::stable::Tensor> k_scale,
                                      std::optional<torch::stable::Tensor> v_scale,
                                      torch::stable::Tensor block_tables,
                                      torch::stable::Tensor lengths,
                                      torch::stable::Tensor query_starts, double softmax_scale,
                                      std::optional<int64_t> sliding_window,
                                      std::optional<double> softcap);

torch::stable::Tensor decoder_step(
    torch::stable::Tensor hidden, std::vector<torch::stable::Tensor> weights,
    std::vector<torch::stable::Tensor> caches, std::vector<int64_t> numbers,
    torch::stable::Tensor final_norm, torch::stable::Tensor cos, torch::stable::Tensor sin,
    torch::stable::Tensor slots, torch::stable::Tensor block_tables, torch::stable::Tensor lengths,
    torch::stable::Tensor query_starts, int64_t heads, int64_t kv_heads, double eps,
    double softmax_scale, std::string activation, std::optional<double> softcap);

std::tuple<torch::stable::Tensor, torch::stable::Tensor> head_step(
    torch::stable::Tensor known, torch::stable::Tensor token_ids, torch::stable::Tensor embedding,
    std::vector<torch::stable::Tensor> weights, std::vector<torch::stable::Tensor> caches,
    std::vector<int64_t> numbers, torch::stable::Tensor cos, torch::stable::Tensor sin,
    torch::stable::Tensor positions, torch::stable::Tensor slots,
    torch::stable::Tensor block_tables, torch::stable::Tensor lengths,
    torch::stable::Tensor query_starts, int64_t heads, int64_t kv_heads, double eps,
    double softmax_scale, std::string activation);

torch::stable::Tensor expert_mlps(torch::stable::Tensor x, torch::stable::Tensor numbers,
                                  torch::stable::Tensor weights,
                                  std::vector<torch::stable::Tensor> linears,
                                  std::vector<int64_t> group_sizes, std::string activation);

torch::stable::Tensor argmax_rows(torch::stable::Tensor scores);

torch::stable::Tensor sample_gumbel(torch::stable::Tensor scores, torch::stable::Tensor keys);

std::tuple<torch::stable::Tensor, torch::stable::Tensor> draw_rows(
    torch::stable::Tensor scores, std::optional<torch::stable::Tensor> keys,
    std::optional<torch::stable::Tensor> token_ids, int64_t vocab, double temperature);

torch::stable::Tensor round_rows(torch::stable::Tensor x,
                                 std::optional<torch::stable::Tensor> scale, std::string format);

torch::stable::Tensor scale_errors(torch::stable::Tensor weight, torch::stable::Tensor scales,
                                   torch::stable::Tensor importance, std::string format);

std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor> feed_back(
    torch::stable::Tensor aims, torch::stable::Tensor target, torch::stable::Tensor factor,
    torch::stable::Tensor scales, int64_t first_exact, std::string format);

torch::stable::Tensor gram(torch::stable::Tensor rows);

torch::stable::Tensor read_memory(torch::stable::Tensor x);

}  // namespace quantkit
