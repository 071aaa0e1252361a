// What fp8_linear and fp8_gated_linear ask of their kernels. Neither torch nor device code.
#pragma once

#include <cstdint>

#include "../types.h"

struct CUstream_st;  // cudaStream_t points to one

namespace quantkit::cuda {

struct LinearCall {
  const void* x;         // [tokens, columns], bfloat16 or float16
  const uint8_t* codes;  // [features, columns], or [2 * features, columns]: gate rows, then up rows
  const float* scale;    // [rows of codes, groups]
  const void* bias;      // [rows of codes] or null
  void* out;             // [tokens, features], of x's type
  int64_t tokens;
  int64_t columns;
  int64_t features;
  int64_t groups;
  int64_t group_size;  // columns
  OutlierMatrix outliers;  // of the rows of codes
  FloatType bias_type;
  Activation activation;  // of gated calls
};

// Launches the kernels of a format of codes; defined in weight_linear_<format>.cu. x_type is that
// of x and out. `overlap`: the device can start this kernel before the previous one has ended.
template <class Format>
void launch_weight_linear(const LinearCall& call, FloatType x_type, bool gated, CUstream_st* stream,
                          bool overlap);

}  // namespace quantkit::cuda
