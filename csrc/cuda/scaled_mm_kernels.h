// The scaled_mm kernels, one function a file. An architecture that the library was not built for
// has none: scaled_mm.cu asks QK_HAS_SM<xx> (csrc/build_cuda.py) before it names one.
#pragma once

#include "scaled_mm_problem.h"

namespace quantkit::cuda {

ScaledMmKernel scaled_mm_swap_64x16x256_sm90a();
ScaledMmKernel scaled_mm_swap_64x32x256_sm90a();
ScaledMmKernel scaled_mm_swap_64x64x256_sm90a();
ScaledMmKernel scaled_mm_64x128x128_pingpong_sm90a();
ScaledMmKernel scaled_mm_128x128x128_pingpong_sm90a();
ScaledMmKernel block_scaled_mm_128x128x128_sm90a();
ScaledMmKernel gated_mm_swap_64x64x256_sm90a();
ScaledMmKernel gated_mm_128x128x128_pingpong_sm90a();

ScaledMmKernel scaled_mm_16x64x128_sm89();
ScaledMmKernel scaled_mm_64x64x128_sm89();
ScaledMmKernel scaled_mm_64x128x128_sm89();
ScaledMmKernel scaled_mm_128x128x64_sm89();

ScaledMmKernel scaled_mm_swap_128x32x128_sm100a();
ScaledMmKernel scaled_mm_128x128x128_sm100a();
ScaledMmKernel scaled_mm_256x128x128_sm100a();

ScaledMmKernel scaled_mm_64x64x128_sm120a();
ScaledMmKernel scaled_mm_128x128x128_sm120a();

}  // namespace quantkit::cuda
