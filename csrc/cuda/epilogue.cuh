// The arithmetic at the end of scaled_mm, one output at a time:
//
//   out = round(activation(sum * weight_scale[n] * a_scale[m] + bias[n]))
//
// float32 until the one rounding. No CUTLASS here: epilogue_sm90.cuh and epilogue_sm89.cuh put
// these functions into CUTLASS's trees, tests/cuda runs them on the host.
#pragma once

#include "activation.cuh"
#include "intrinsics.cuh"
#include "scaled_mm_problem.h"

namespace quantkit::cuda {

// What the last node of the tree needs to know, the same for the whole launch.
struct FinishArguments {
  int activation = kNoActivation;
  bool half = false;  // write float16 rather than bfloat16
};

// The order of the two products is the same whether or not the operands are swapped.
QK_DEVICE float scale_and_shift(float sum, float weight_scale, float a_scale, float bias) {
  return fmaf(sum * weight_scale, a_scale, bias);
}

template <Activation kKind, int kCount>
QK_DEVICE void activate_all(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = activate<kKind>(values[i]);
}

// One branch for many values, not one for each. Any other kind changes nothing.
template <int kCount>
QK_DEVICE void activate_all(int kind, float (&values)[kCount]) {
  switch (static_cast<Activation>(kind)) {
    case Activation::kSilu: activate_all<Activation::kSilu>(values); break;
    case Activation::kGelu: activate_all<Activation::kGelu>(values); break;
    case Activation::kGeluTanh: activate_all<Activation::kGeluTanh>(values); break;
    case Activation::kRelu: activate_all<Activation::kRelu>(values); break;
    default: break;
  }
}

// Rounds pairs of values to the 16-bit type of the output. Both types have 16 bits, and everything
// before and after this only moves bits: one kernel, declared to write bfloat16, serves both.
template <int kCount>
QK_DEVICE void round_all(bool half, const float (&values)[kCount], uint32_t (&pairs)[kCount / 2]) {
  static_assert(kCount % 2 == 0, "values are rounded in pairs");
  if (half) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) pairs[i / 2] = pack2<Half>(values[i], values[i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) pairs[i / 2] = pack2<BFloat16>(values[i], values[i + 1]);
  }
}

// The whole epilogue for some outputs of one thread.
template <int kCount>
QK_DEVICE void finish(const float* sums, const float* weight_scales, const float* a_scales,
                      const float* biases, const FinishArguments& arguments,
                      uint32_t (&pairs)[kCount / 2]) {
  float values[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = scale_and_shift(sums[i], weight_scales[i], a_scales[i], biases[i]);
  }
  activate_all(arguments.activation, values);
  round_all(arguments.half, values, pairs);
}

// Gated: `count` values of gate, and those of up that belong to them.
template <int kCount>
QK_DEVICE void finish_gated(float (&gates)[kCount], const float (&ups)[kCount],
                            const FinishArguments& arguments, uint32_t (&pairs)[kCount / 2]) {
  activate_all(arguments.activation, gates);
#pragma unroll
  for (int i = 0; i < kCount; ++i) gates[i] *= ups[i];
  round_all(arguments.half, gates, pairs);
}

// A weight of `inner` rows of gate, then as many of up, is multiplied in turns of eight rows of
// each. Returns which row of the weight is number `row` of these; for one of gate, it is the column
// of the output too.
QK_DEVICE int stacked_row(int row, int inner) {
  return row / 16 * 8 + row % 8 + (row / 8 % 2 == 0 ? 0 : inner);
}

}  // namespace quantkit::cuda
