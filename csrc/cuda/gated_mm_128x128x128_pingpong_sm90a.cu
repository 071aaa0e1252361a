// scaled_gated_mm, sm_90a: many rows.
#include "gated_mm_sm90.cuh"
#include "scaled_mm_kernels.h"
#include "scaled_mm_sm90.cuh"

namespace quantkit::cuda {

ScaledMmKernel gated_mm_128x128x128_pingpong_sm90a() {
  using namespace cute;
  using Collectives = GatedCollectives<Shape<_128, _128, _128>, Shape<_2, _1, _1>,
                                       cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum,
                                       cutlass::epilogue::TmaWarpSpecialized, false>;
  return ScaledMmTma<Collectives>::kernel();
}

}  // namespace quantkit::cuda
