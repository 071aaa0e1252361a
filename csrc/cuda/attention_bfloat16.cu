// Attention to caches of plain bfloat16 values.

#include "attention_kernels.cuh"

namespace quantkit::cuda {
namespace {

template <int head_dim, int row_tiles, int blocks_per_sm, bool shared_query = false>
AttentionKernel kernel() {
  return attention_kernel<
      AttentionShape<BFloat16, head_dim, row_tiles, 1, 4, 256, blocks_per_sm, shared_query>>();
}

// Registers decide how many blocks there is room for.
const AttentionKernel kKernels[] = {
    kernel<64, 1, 4>(),  kernel<64, 2, 3>(),  kernel<64, 4, 2>(), kernel<80, 1, 3>(),
    kernel<80, 2, 2>(),  kernel<96, 1, 3>(),  kernel<96, 2, 2>(), kernel<128, 1, 3>(),
    kernel<128, 2, 2>(), kernel<192, 1, 2>(), kernel<256, 1, 2, true>(),
};

}  // namespace

std::span<const AttentionKernel> bfloat16_attention_kernels() { return kKernels; }

}  // namespace quantkit::cuda
