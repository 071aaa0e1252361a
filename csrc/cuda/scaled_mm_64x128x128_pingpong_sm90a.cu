// scaled_mm, sm_90a: outputs that fill too few SMs in larger tiles.
#include "scaled_mm_kernels.h"
#include "scaled_mm_sm90.cuh"

namespace quantkit::cuda {

ScaledMmKernel scaled_mm_64x128x128_pingpong_sm90a() {
  using namespace cute;
  using Collectives =
      ScaledMmCollectives<cutlass::arch::Sm90, Shape<_64, _128, _128>, Shape<_2, _1, _1>,
                          cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum,
                          cutlass::epilogue::TmaWarpSpecialized, false>;
  return ScaledMmTma<Collectives>::kernel();
}

}  // namespace quantkit::cuda
