// scaled_mm, sm_89: up to 64 rows.
#include "scaled_mm_kernels.h"
#include "scaled_mm_sm89.cuh"

namespace quantkit::cuda {

ScaledMmKernel scaled_mm_64x64x128_sm89() {
  using cutlass::gemm::GemmShape;
  return ScaledMmSm89<GemmShape<64, 64, 128>, GemmShape<32, 64, 64>, 5>::kernel();
}

}  // namespace quantkit::cuda
