// The part of a linear layer that is not in its codes: a few input channels, the outliers, have
// weights in bfloat16 beside them.
//   apart[m, f] = sum_j x[m, outlier_columns[j]] * outlier_weight[j, f], in float32
// A channel's weights of neighbouring features are neighbours in memory.
#pragma once

#include "intrinsics.cuh"
#include "weight_linear.h"

namespace quantkit::cuda {

QK_DEVICE float outlier_weight(const LinearCall& call, int64_t outlier, int64_t row, int64_t rows) {
  return widen(BFloat16{call.outliers.weight[outlier * rows + row]});
}

// Sends for the weights that a block needs at its end: a sector holds those of a tile's features.
template <class Shape, int kParts>
QK_DEVICE void prefetch_outliers(const LinearCall& call, int64_t first_feature) {
  constexpr int kTiles = Shape::kRowTiles * kParts;
  for (int64_t i = threadIdx.x; i < call.outliers.count * kTiles; i += Shape::kThreads) {
    const int tile = static_cast<int>(i % kTiles);
    const int64_t feature = first_feature + tile / kParts * 16;
    if (feature >= call.features) continue;
    const int64_t row = tile % kParts * call.features + feature;
    prefetch(call.outliers.weight + i / kTiles * kParts * call.features + row);
  }
}

// One thread's share of 8 tokens from `x` on and one feature: every kThreads / 16-th outlier, from
// that of its group of 16 threads. Tokens from `count` on are left at 0.
template <class T, class Shape, int kParts>
QK_DEVICE void multiply_outliers(const LinearCall& call, const T* x, int count, int64_t feature,
                                 float (&sums)[kParts][8]) {
#pragma unroll 1
  for (int64_t j = threadIdx.x / 16; j < call.outliers.count; j += Shape::kThreads / 16) {
    float weights[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      weights[part] =
          outlier_weight(call, j, part * call.features + feature, kParts * call.features);
    }
    const T* column = x + call.outliers.columns[j];
#pragma unroll
    for (int token = 0; token < 8; ++token) {
      if (token >= count) break;
      const float value = widen(column[token * call.columns]);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        sums[part][token] = fmaf(value, weights[part], sums[part][token]);
      }
    }
  }
}

// Leaves in `shared` what the outliers of each warp add to 16 features of the block's tokens.
template <class T, class Shape, int kParts>
QK_DEVICE void share_outliers(const LinearCall& call, int64_t first_token, int64_t first_feature,
                              float (&shared)[kParts][Shape::kTokenTiles][16][8]) {
  const int row = threadIdx.x % 16;
  const int64_t last = call.features - 1;
  const int64_t feature = first_feature + row < last ? first_feature + row : last;
#pragma unroll 1
  for (int tile = 0; tile < Shape::kTokenTiles; ++tile) {
    const int64_t token = first_token + tile * 8;
    const int64_t left = call.tokens - token;
    const int count = static_cast<int>(left < 0 ? 0 : left < 8 ? left : 8);
    const T* x = static_cast<const T*>(call.x) + (count > 0 ? token : 0) * call.columns;
    float sums[kParts][8] = {};
    multiply_outliers<T, Shape, kParts>(call, x, count, feature, sums);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float both = sums[part][i] + __shfl_xor_sync(kAllLanes, sums[part][i], 16);
        if (threadIdx.x % kWarp < 16) shared[part][tile][row][i] = both;
      }
    }
  }
}

}  // namespace quantkit::cuda
