// scaled_gated_mm, sm_90a: up to 64 rows of activations; weights are the left operand.
#include "gated_mm_sm90.cuh"
#include "scaled_mm_kernels.h"
#include "scaled_mm_sm90.cuh"

namespace quantkit::cuda {

ScaledMmKernel gated_mm_swap_64x64x256_sm90a() {
  using namespace cute;
  using Collectives = GatedCollectives<Shape<_64, _64, _256>, Shape<_1, _1, _1>,
                                       cutlass::gemm::KernelTmaWarpSpecializedFP8FastAccum,
                                       cutlass::epilogue::TmaWarpSpecialized, true>;
  return ScaledMmTma<Collectives>::kernel();
}

}  // namespace quantkit::cuda
