// Argument checks of the ops, those that do not depend on the device. Every message reads
//   op: argument must be <expected>, got <actual>
// and quantkit/op_checks.py raises the same texts from the reference kernels.
// Include cpu/checks.h or cuda/checks.h, which add what the device decides.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>

#include "types.h"

namespace quantkit {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

[[noreturn]] inline void fail(const char* op, const char* argument, const std::string& expected,
                              const std::string& actual) {
  throw std::runtime_error(std::string(op) + ": " + argument + " must be " + expected + ", got " +
                           actual);
}

template <class Sizes>
std::string shape_text(const Sizes& sizes) {
  std::string text = "[";
  for (int64_t size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

inline std::string dtype_text(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Float8_e4m3fnuz: return "float8_e4m3fnuz";
    case ScalarType::Float8_e5m2: return "float8_e5m2";
    case ScalarType::Float8_e5m2fnuz: return "float8_e5m2fnuz";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    default: return "dtype number " + std::to_string(static_cast<int>(type));
  }
}

// Throws unless the tensor is on the ops' device and contiguous. Each device defines its own.
inline void check_layout(const char* op, const char* argument, const Tensor& tensor);

inline void check_contiguous(const char* op, const char* argument, const Tensor& tensor) {
  if (!tensor.is_contiguous()) {
    fail(op, argument, "contiguous", "strides " + shape_text(tensor.strides()));
  }
}

// `letters` names the dimensions; a negative size in `expected` admits any.
inline void check_shape(const char* op, const char* argument, const Tensor& tensor,
                        const char* letters, std::initializer_list<int64_t> expected) {
  bool same = tensor.dim() == static_cast<int64_t>(expected.size());
  std::string sizes;
  int64_t i = 0;
  for (int64_t size : expected) {
    same = same && (size < 0 || tensor.sizes()[i] == size);
    sizes += (i == 0 ? "" : ", ") + (size < 0 ? "any" : std::to_string(size));
    ++i;
  }
  if (!same) {
    const std::string wanted = "of shape " + std::string(letters) + " = [" + sizes + "]";
    fail(op, argument, wanted, shape_text(tensor.sizes()));
  }
}

inline FloatType float_type(const char* op, const char* argument, ScalarType type) {
  switch (type) {
    case ScalarType::Float: return FloatType::kFloat32;
    case ScalarType::BFloat16: return FloatType::kBFloat16;
    case ScalarType::Half: return FloatType::kFloat16;
    default: fail(op, argument, "float32, bfloat16 or float16", dtype_text(type));
  }
}

inline WeightFormat stored_format(FloatType type) {
  switch (type) {
    case FloatType::kFloat32: return WeightFormat::kFloat32;
    case FloatType::kBFloat16: return WeightFormat::kBFloat16;
    case FloatType::kFloat16: return WeightFormat::kFloat16;
  }
  return WeightFormat::kFloat32;
}

inline void check_same_dtype(const char* op, const char* argument, const Tensor& tensor,
                             const Tensor& x) {
  if (tensor.scalar_type() != x.scalar_type()) {
    fail(op, argument, "of x's dtype, " + dtype_text(x.scalar_type()),
         dtype_text(tensor.scalar_type()));
  }
}

// [tokens, heads, head_dim] whose heads lie side by side: a contiguous tensor, or some of the heads
// of a wider one.
inline void check_side_by_side(const char* op, const char* argument, const Tensor& tensor) {
  const bool side_by_side = (tensor.size(2) == 1 || tensor.stride(2) == 1) &&
                            (tensor.size(1) == 1 || tensor.stride(1) == tensor.size(2));
  if (tensor.numel() > 0 && !side_by_side) {
    fail(op, argument, "contiguous but for its first dimension",
         "strides " + shape_text(tensor.strides()));
  }
}

inline WeightFormat weight_format(const char* op, ScalarType type) {
  switch (type) {
    case ScalarType::Float8_e4m3fn: return WeightFormat::kE4M3;
    case ScalarType::Float8_e5m2: return WeightFormat::kE5M2;
    case ScalarType::Byte: return WeightFormat::kE3M4;
    default:
      fail(op, "weight", "float8_e4m3fn, float8_e5m2 or uint8 (E3M4 codes)", dtype_text(type));
  }
}

// The weight [N, K] and its scale [N, ceil(K / group_size)].
inline WeightMatrix weight_matrix(const char* op, const Tensor& weight, const Tensor& scale,
                                  int64_t group_size) {
  const WeightFormat format = weight_format(op, weight.scalar_type());
  check_shape(op, "weight", weight, "[N, K]", {-1, -1});
  check_layout(op, "weight", weight);
  if (group_size < 1) fail(op, "group_size", "at least 1", std::to_string(group_size));
  const int64_t rows = weight.size(0);
  const int64_t columns = weight.size(1);
  const int64_t groups = columns / group_size + (columns % group_size != 0);
  if (scale.scalar_type() != ScalarType::Float) {
    fail(op, "weight_scale", "float32", dtype_text(scale.scalar_type()));
  }
  check_shape(op, "weight_scale", scale, "[N, ceil(K / group_size)]", {rows, groups});
  check_layout(op, "weight_scale", scale);
  return {.codes = static_cast<const uint8_t*>(weight.const_data_ptr()),
          .scale = static_cast<const float*>(scale.const_data_ptr()),
          .rows = rows,
          .columns = columns,
          .group_size = group_size,
          .groups = groups,
          .format = format};
}

// The columns [n] and their weight [n, N], N being `rows`; the columns' numbers are not looked at.
inline OutlierMatrix outlier_matrix(const char* op, const std::optional<Tensor>& columns,
                                    const std::optional<Tensor>& weight, int64_t rows) {
  if (columns.has_value() != weight.has_value()) {
    const char* missing = columns.has_value() ? "outlier_weight" : "outlier_columns";
    const char* given = columns.has_value() ? "outlier_columns" : "outlier_weight";
    fail(op, missing, std::string("given with ") + given, "None");
  }
  if (!columns.has_value()) return {};
  if (columns->scalar_type() != ScalarType::Int) {
    fail(op, "outlier_columns", "int32", dtype_text(columns->scalar_type()));
  }
  check_shape(op, "outlier_columns", *columns, "[n]", {-1});
  check_layout(op, "outlier_columns", *columns);
  if (weight->scalar_type() != ScalarType::BFloat16) {
    fail(op, "outlier_weight", "bfloat16", dtype_text(weight->scalar_type()));
  }
  check_shape(op, "outlier_weight", *weight, "[n, N]", {columns->size(0), rows});
  check_layout(op, "outlier_weight", *weight);
  return {.columns = static_cast<const int32_t*>(columns->const_data_ptr()),
          .weight = static_cast<const uint16_t*>(weight->const_data_ptr()),
          .count = columns->size(0)};
}

inline Activation activation_named(const char* op, const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "relu") return Activation::kRelu;
  fail(op, "activation", "silu, gelu, gelu_tanh or relu", "'" + name + "'");
}

// The weight [N, K] of a layer that is not quantized.
inline WeightMatrix float_matrix(const char* op, const Tensor& weight) {
  const FloatType type = float_type(op, "weight", weight.scalar_type());
  check_shape(op, "weight", weight, "[N, K]", {-1, -1});
  check_layout(op, "weight", weight);
  return {.codes = static_cast<const uint8_t*>(weight.const_data_ptr()),
          .scale = nullptr,
          .rows = weight.size(0),
          .columns = weight.size(1),
          .group_size = std::max<int64_t>(1, weight.size(1)),
          .groups = 1,
          .format = stored_format(type)};
}

}  // namespace quantkit
