// scaled_mm, sm_90a: up to 32 rows, or up to 64 where a narrower tile fills more SMs.
#include "scaled_mm_kernels.h"
#include "scaled_mm_sm90.cuh"

namespace quantkit::cuda {

ScaledMmKernel scaled_mm_swap_64x32x256_sm90a() {
  using namespace cute;
  using Collectives =
      ScaledMmCollectives<cutlass::arch::Sm90, Shape<_64, _32, _256>, Shape<_1, _1, _1>,
                          cutlass::gemm::KernelTmaWarpSpecializedFP8FastAccum,
                          cutlass::epilogue::TmaWarpSpecialized, true>;
  return ScaledMmTma<Collectives>::kernel();
}

}  // namespace quantkit::cuda
