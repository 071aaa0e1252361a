// Argument checks of the ops in scaled_mm.cu. Host code.
#pragma once

#include <climits>

#include "checks.h"
#include "scaled_mm_problem.h"

namespace quantkit::cuda {

// What an op was given: both operands with their scales, E4M3 codes a [M, K] and weight [N, K].
struct ScaledMmCall {
  const char* op;
  const Tensor& a;
  const Tensor& a_scale;
  const Tensor& weight;
  const Tensor& weight_scale;
  const std::optional<Tensor>& bias;
  ScalarType dtype;  // of the result

  int64_t m() const { return a.size(0); }
  int64_t n() const { return weight.size(0); }
  int64_t k() const { return weight.size(1); }
};

inline int activation_kind(const char* op, const std::string& name) {
  if (name == "none") return kNoActivation;
  if (name == "silu") return static_cast<int>(Activation::kSilu);
  if (name == "gelu") return static_cast<int>(Activation::kGelu);
  if (name == "gelu_tanh") return static_cast<int>(Activation::kGeluTanh);
  if (name == "relu") return static_cast<int>(Activation::kRelu);
  fail(op, "activation", "none, silu, gelu, gelu_tanh or relu", "'" + name + "'");
}

inline void check_dtype(const char* op, const char* argument, const Tensor& tensor,
                        ScalarType expected) {
  if (tensor.scalar_type() != expected) {
    fail(op, argument, dtype_text(expected), dtype_text(tensor.scalar_type()));
  }
}

// TMA's rule.
inline void check_aligned(const char* op, const char* argument, const Tensor& tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  if (address % 16 != 0) {
    fail(op, argument, "at an address that is a multiple of 16",
         "one " + std::to_string(address % 16) + " bytes above");
  }
}

inline void check_codes(const char* op, const char* argument, const Tensor& tensor,
                        const char* letters, int64_t columns) {
  check_dtype(op, argument, tensor, ScalarType::Float8_e4m3fn);
  check_shape(op, argument, tensor, letters, {-1, columns});
  check_layout(op, argument, tensor);
  check_aligned(op, argument, tensor);
}

// float32 of this shape.
inline void check_scale(const char* op, const char* argument, const Tensor& tensor,
                        const char* letters, std::initializer_list<int64_t> shape) {
  check_dtype(op, argument, tensor, ScalarType::Float);
  check_shape(op, argument, tensor, letters, shape);
  check_layout(op, argument, tensor);
  check_aligned(op, argument, tensor);
}

inline void check_operands(const ScaledMmCall& call) {
  const char* op = call.op;
  check_codes(op, "weight", call.weight, "[N, K]", -1);
  check_codes(op, "a", call.a, "[M, K]", call.k());
  if (call.n() % 16 != 0 || call.k() % 16 != 0 || call.k() == 0) {
    fail(op, "weight", "of sizes that are multiples of 16", shape_text(call.weight.sizes()));
  }
  if (call.m() > INT_MAX - 256 || call.n() > INT_MAX - 256) {
    fail(op, "a", "of less than 2^31 rows, and weight too", shape_text(call.a.sizes()));
  }
  if (call.dtype != ScalarType::BFloat16 && call.dtype != ScalarType::Half) {
    fail(op, "dtype", "bfloat16 or float16", dtype_text(call.dtype));
  }
}

// One scale for each row of the weight, and for each of a or for all of it.
inline void check_row_scales(const ScaledMmCall& call) {
  const char* op = call.op;
  const Tensor& a_scale = call.a_scale;
  check_dtype(op, "a_scale", a_scale, ScalarType::Float);
  if (a_scale.dim() != 1 || a_scale.size(0) != 1) {
    check_shape(op, "a_scale", a_scale, "[M] or [1], [M]", {call.m()});
  }
  check_layout(op, "a_scale", a_scale);
  check_scale(op, "weight_scale", call.weight_scale, "[N]", {call.n()});
}

// One scale for each 128 columns of a row of a, and for each block of 128 x 128 weights.
inline void check_block_scales(const ScaledMmCall& call) {
  constexpr int64_t kBlock = 128;
  const char* op = call.op;
  if (call.k() % kBlock != 0) {
    fail(op, "weight", "of K a multiple of 128", shape_text(call.weight.sizes()));
  }
  const int64_t groups = call.k() / kBlock;
  check_scale(op, "a_scale", call.a_scale, "[K / 128, M rounded up to 4]",
              {groups, (call.m() + 3) / 4 * 4});
  check_scale(op, "weight_scale", call.weight_scale, "[ceil(N / 128), K / 128]",
              {(call.n() + kBlock - 1) / kBlock, groups});
}

// The bias as the kernels read it, float32: itself, or, with one small kernel more, converted.
inline std::optional<Tensor> float_bias(const ScaledMmCall& call) {
  const std::optional<Tensor>& bias = call.bias;
  if (!bias.has_value()) return std::nullopt;
  const FloatType type = float_type(call.op, "bias", bias->scalar_type());
  check_shape(call.op, "bias", *bias, "[N]", {call.n()});
  check_layout(call.op, "bias", *bias);
  if (type != FloatType::kFloat32) return torch::stable::to(*bias, ScalarType::Float);
  check_aligned(call.op, "bias", *bias);
  return bias;
}

}  // namespace quantkit::cuda
