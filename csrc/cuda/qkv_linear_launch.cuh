// launch_qkv_linear of qkv_linear.h. Only qkv_linear_<format>.cu include it, one format each.
#pragma once

#include "launch_overlapped.h"
#include "qkv_linear.h"
#include "qkv_linear_dispatch.h"

namespace quantkit::cuda {

template <class Format>
bool launch_qkv_linear(const QkvCall& call, FloatType x_type, cudaStream_t stream, bool overlap) {
  if (!fits_qkv_linear(call)) return false;
  const auto launch = [&](auto* kernel, dim3 grid, int threads, const QkvCall& argument) {
    launch_overlapped(overlap, kernel, grid, threads, 0, stream, argument);
  };
  if (x_type == FloatType::kBFloat16) {
    dispatch_qkv_linear<Format, BFloat16>(call, launch);
  } else {
    dispatch_qkv_linear<Format, Half>(call, launch);
  }
  return true;
}

}  // namespace quantkit::cuda
