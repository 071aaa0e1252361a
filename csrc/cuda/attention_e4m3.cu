// Attention to caches of E4M3 codes.

#include "attention_codes.cuh"

namespace quantkit::cuda {

std::span<const AttentionKernel> e4m3_attention_kernels() { return CodeKernels<E4M3>::table(); }

}  // namespace quantkit::cuda
