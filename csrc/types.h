// What the kernels of every device are told about their arguments. No torch, no device code.
#pragma once

#include <cstdint>

#include "cpu/formats.h"

namespace quantkit {

enum class FloatType { kFloat32, kBFloat16, kFloat16 };
enum class Activation { kSilu, kGelu, kGeluTanh, kRelu };

// Weights of a linear layer, exactly as a checkpoint stores them.
struct WeightMatrix {
  const uint8_t* codes;  // [rows, columns] numbers of `format`, contiguous
  const float* scale;    // [rows, groups], contiguous, groups = ceil(columns / group_size); or null
  int64_t rows;
  int64_t columns;
  int64_t group_size;
  int64_t groups;
  WeightFormat format;
};

// Input channels of a linear layer whose weights are (also) kept in bfloat16; count 0 for none.
struct OutlierMatrix {
  const int32_t* columns;  // [count]
  const uint16_t* weight;  // [count, rows of the weight], contiguous
  int64_t count;
};

inline int64_t bytes_of(FloatType type) { return type == FloatType::kFloat32 ? 4 : 2; }
inline int64_t bytes_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFloat32: return 4;
    case WeightFormat::kBFloat16:
    case WeightFormat::kFloat16: return 2;
    default: return 1;
  }
}

}  // namespace quantkit
