// scaled_mm, sm_100a: up to 64 rows of activations; weights are the left operand.
#include "scaled_mm_kernels.h"
#include "scaled_mm_sm90.cuh"

namespace quantkit::cuda {

ScaledMmKernel scaled_mm_swap_128x32x128_sm100a() {
  using namespace cute;
  using Collectives =
      ScaledMmCollectives<cutlass::arch::Sm100, Shape<_128, _32, _128>, Shape<_4, _1, _1>,
                          cutlass::gemm::collective::KernelScheduleAuto,
                          cutlass::epilogue::collective::EpilogueScheduleAuto, true>;
  return ScaledMmTma<Collectives>::kernel();
}

}  // namespace quantkit::cuda
