// scaled_mm, sm_100a: many rows; two SMs share a tile.
#include "scaled_mm_kernels.h"
#include "scaled_mm_sm90.cuh"

namespace quantkit::cuda {

ScaledMmKernel scaled_mm_256x128x128_sm100a() {
  using namespace cute;
  using Collectives =
      ScaledMmCollectives<cutlass::arch::Sm100, Shape<_256, _128, _128>, Shape<_2, _1, _1>,
                          cutlass::gemm::collective::KernelScheduleAuto,
                          cutlass::epilogue::collective::EpilogueScheduleAuto, false,
                          Shape<_128, _128, _128>>;
  return ScaledMmTma<Collectives>::kernel();
}

}  // namespace quantkit::cuda
