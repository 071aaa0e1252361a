// Attention to caches of E3M4 codes.

#include "attention_codes.cuh"

namespace quantkit::cuda {

std::span<const AttentionKernel> e3m4_attention_kernels() { return CodeKernels<E3M4>::table(); }

}  // namespace quantkit::cuda
