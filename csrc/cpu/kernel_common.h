// What the kernel templates share: floats of three types, activations, unrolling.
// Part of kernel_template.h; include only that.
#pragma once

#include "float16.h"
#include "kernels.h"

namespace quantkit {
namespace {

#if defined(__clang__)
#define QK_UNROLL _Pragma("unroll")
#else
#define QK_UNROLL _Pragma("GCC unroll 16")
#endif

inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows of x that a kernel computes for `batch` of them; the rest is zero padding.
inline int padded_batch(int batch) {
  int padded = 1;
  while (padded < batch) padded *= 2;
  return padded;
}

inline float load_float(const void* data, FloatType type, int64_t index) {
  switch (type) {
    case FloatType::kFloat32: return static_cast<const float*>(data)[index];
    case FloatType::kBFloat16: return to_float(static_cast<const BFloat16*>(data)[index]);
    case FloatType::kFloat16: return to_float(static_cast<const Half*>(data)[index]);
  }
  return 0.0f;
}

inline void store_float(float value, void* data, FloatType type, int64_t index) {
  switch (type) {
    case FloatType::kFloat32: return from_float(value, static_cast<float*>(data) + index);
    case FloatType::kBFloat16: return from_float(value, static_cast<BFloat16*>(data) + index);
    case FloatType::kFloat16: return from_float(value, static_cast<Half*>(data) + index);
  }
}

inline float activate(float value, Activation activation) {
  switch (activation) {
    case Activation::kSilu: return value / (1.0f + __builtin_expf(-value));
    case Activation::kGelu: return 0.5f * value * (1.0f + __builtin_erff(value * 0.70710678f));
    case Activation::kGeluTanh: {
      const float inner = 0.79788456f * (value + 0.044715f * value * value * value);
      return 0.5f * value * (1.0f + __builtin_tanhf(inner));
    }
    case Activation::kRelu: return value < 0.0f ? 0.0f : value;  // NaN passes through
  }
  return value;
}

}  // namespace
}  // namespace quantkit
