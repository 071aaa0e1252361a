// scaled_mm, sm_120a: up to 256 rows.
#include "scaled_mm_kernels.h"
#include "scaled_mm_sm90.cuh"

namespace quantkit::cuda {

ScaledMmKernel scaled_mm_64x64x128_sm120a() {
  using namespace cute;
  using Collectives =
      ScaledMmCollectives<cutlass::arch::Sm120, Shape<_64, _64, _128>, Shape<_1, _1, _1>,
                          cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                          cutlass::epilogue::collective::EpilogueScheduleAuto, false>;
  return ScaledMmTma<Collectives>::kernel();
}

}  // namespace quantkit::cuda
