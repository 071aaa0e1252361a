// launch_weight_linear of weight_linear.h. Only weight_linear_<format>.cu include it, one format
// each, because every kernel is compiled for every type, grouping and number of tokens.
#pragma once

#include "launch_overlapped.h"
#include "weight_linear_dispatch.h"

namespace quantkit::cuda {

template <class Format>
void launch_weight_linear(const LinearCall& call, FloatType x_type, bool gated, cudaStream_t stream,
                          bool overlap) {
  const auto launch = [&](auto* kernel, dim3 grid, int threads, const LinearCall& argument) {
    launch_overlapped(overlap, kernel, grid, threads, 0, stream, argument);
  };
  if (x_type == FloatType::kBFloat16) {
    dispatch_weight_linear<Format, BFloat16>(call, gated, launch);
  } else {
    dispatch_weight_linear<Format, Half>(call, gated, launch);
  }
}

}  // namespace quantkit::cuda
