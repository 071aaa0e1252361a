// scaled_mm, sm_89: up to 256 rows.
#include "scaled_mm_kernels.h"
#include "scaled_mm_sm89.cuh"

namespace quantkit::cuda {

ScaledMmKernel scaled_mm_64x128x128_sm89() {
  using cutlass::gemm::GemmShape;
  return ScaledMmSm89<GemmShape<64, 128, 128>, GemmShape<64, 64, 64>, 3>::kernel();
}

}  // namespace quantkit::cuda
