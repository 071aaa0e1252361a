// scaled_mm, sm_89: many rows.
#include "scaled_mm_kernels.h"
#include "scaled_mm_sm89.cuh"

namespace quantkit::cuda {

ScaledMmKernel scaled_mm_128x128x64_sm89() {
  using cutlass::gemm::GemmShape;
  return ScaledMmSm89<GemmShape<128, 128, 64>, GemmShape<64, 64, 64>, 5>::kernel();
}

}  // namespace quantkit::cuda
