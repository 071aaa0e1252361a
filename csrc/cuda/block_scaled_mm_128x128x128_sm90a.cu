// block_scaled_mm, sm_90a.
#include "block_scaled_mm_sm90.cuh"
#include "scaled_mm_kernels.h"

namespace quantkit::cuda {

ScaledMmKernel block_scaled_mm_128x128x128_sm90a() {
  using namespace cute;
  using Collectives =
      BlockScaledCollectives<Shape<_128, _128, _128>, Shape<_1, _2, _1>,
                             cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8Blockwise,
                             cutlass::epilogue::TmaWarpSpecializedCooperative>;
  return ScaledMmTma<Collectives>::kernel();
}

}  // namespace quantkit::cuda
