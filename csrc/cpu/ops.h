// The CPU ops, one source file each. Schemas, shapes and meaning: quantkit/ops.py.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

namespace quantkit {

torch::stable::Tensor fp8_linear(torch::stable::Tensor x, torch::stable::Tensor weight,
                                 torch::stable::Tensor weight_scale,
                                 std::optional<torch::stable::Tensor> bias, int64_t group_size);

torch::stable::Tensor fp8_gated_linear(torch::stable::Tensor x, torch::stable::Tensor weight,
                                       torch::stable::Tensor weight_scale,
                                       std::optional<torch::stable::Tensor> bias,
                                       int64_t group_size, std::string activation);

torch::stable::Tensor dequantize_weight(torch::stable::Tensor weight,
                                        torch::stable::Tensor weight_scale, int64_t group_size,
                                        torch::headeronly::ScalarType dtype);

}  // namespace quantkit
