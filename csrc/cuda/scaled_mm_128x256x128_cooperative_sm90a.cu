// scaled_mm, sm_90a: large outputs: the fewest bytes loaded for each product.
#include "scaled_mm_kernels.h"
#include "scaled_mm_sm90.cuh"

namespace quantkit::cuda {

ScaledMmKernel scaled_mm_128x256x128_cooperative_sm90a() {
  using namespace cute;
  using Collectives =
      ScaledMmCollectives<cutlass::arch::Sm90, Shape<_128, _256, _128>, Shape<_2, _1, _1>,
                          cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum,
                          cutlass::epilogue::TmaWarpSpecializedCooperative, false>;
  return ScaledMmTma<Collectives>::kernel();
}

}  // namespace quantkit::cuda
