// Which kernel of qkv_linear.cuh serves a call; the sums are split as weight_linear_dispatch.h splits
// them, so that fused and unfused layers give the same bits. `launch(kernel, grid, threads, call)`
// does the rest.
#pragma once

#include "qkv_linear.cuh"
#include "weight_linear_dispatch.h"

namespace quantkit::cuda {

constexpr int64_t kMostQkvTokens = kTileTokens;

// Whether qkv_linear can do it; two kernels one after another do what it cannot.
inline bool fits_qkv_linear(const QkvCall& call) {
  return fits_weight_linear(call.linear) && call.linear.tokens <= kMostQkvTokens &&
         call.linear.outliers.count == 0 && call.head_dim % kTileRows == 0 &&
         call.rotary_dim % kTileRows == 0;
}

template <class Format, class T, int kSplits, bool kGrouped, class Launch>
void launch_qkv(const QkvCall& call, const Launch& launch) {
  using Shape = FewTokens<kSplits, false, kGrouped>;
  const dim3 grid(1, static_cast<unsigned>(call.linear.features / Shape::kFeatures));
  launch(qkv_linear<Format, T, Shape, kGrouped>, grid, Shape::kThreads, call);
}

template <class Format, class T, class Launch>
void dispatch_qkv_linear(const QkvCall& call, const Launch& launch) {
  if (call.linear.groups > 1) {
    launch_qkv<Format, T, 8, true>(call, launch);
  } else if (call.linear.features <= kNarrow) {
    launch_qkv<Format, T, 16, false>(call, launch);
  } else {
    launch_qkv<Format, T, 8, false>(call, launch);
  }
}

}  // namespace quantkit::cuda
