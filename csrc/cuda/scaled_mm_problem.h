// What every scaled_mm kernel is given, and what it gives. No torch, no CUTLASS.
//
//   out[m, n] = activation(sum_k a[m, k] * weight[n, k] * a_scale[m] * weight_scale[n] + bias[n])
//
// scaled_gated_mm multiplies the activation of one half by the other: gated_epilogue_sm90.cuh.
// block_scaled_mm is given scales that change along k: block_scaled_mm_sm90.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace quantkit::cuda {

constexpr int kNoActivation = -1;  // otherwise a value of Activation (../types.h)

struct ScaledMmProblem {
  const void* a;              // E4M3 codes [m, k], row-major
  const float* a_scale;       // [m], or one number
  const void* weight;         // E4M3 codes [n, k], row-major
  const float* weight_scale;  // [n]
  const float* bias;          // [n] or null
  void* out;                  // 16-bit floats [m, n], row-major; of scaled_gated_mm [m, n / 2]
  int64_t m;
  int64_t n;
  int64_t k;
  bool a_scale_per_row;
  bool half_out;   // float16 rather than bfloat16
  int activation;  // Activation, or kNoActivation
  int device;
  int multiprocessors;
  int band;  // blocks take tiles of the output in bands of so many: 1, 2, 4 or 8
};

// One kernel: both functions are called with the problem's device current. `run` returns null, or
// what went wrong.
struct ScaledMmKernel {
  size_t (*workspace_size)(const ScaledMmProblem& problem);
  const char* (*run)(const ScaledMmProblem& problem, void* workspace, cudaStream_t stream);
};

}  // namespace quantkit::cuda
