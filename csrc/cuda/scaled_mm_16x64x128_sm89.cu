// scaled_mm, sm_89: up to 16 rows of activations.
#include "scaled_mm_kernels.h"
#include "scaled_mm_sm89.cuh"

namespace quantkit::cuda {

ScaledMmKernel scaled_mm_16x64x128_sm89() {
  using cutlass::gemm::GemmShape;
  return ScaledMmSm89<GemmShape<16, 64, 128>, GemmShape<16, 64, 64>, 5>::kernel();
}

}  // namespace quantkit::cuda
