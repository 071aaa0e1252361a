// The kernels for caches of 8-bit codes: attention_e4m3.cu and attention_e3m4.cu compile them.
#pragma once

#include "attention_kernels.cuh"

namespace quantkit::cuda {

template <class Format>
struct CodeKernels {
  template <int head_dim, int row_tiles, int key_tiles, int blocks_per_sm, bool shared_query>
  static AttentionKernel kernel() {
    return attention_kernel<AttentionShape<Format, head_dim, row_tiles, key_tiles, 4, 256,
                                           blocks_per_sm, shared_query>>();
  }

  // Registers decide how many blocks there is room for. Short keys are taken 32 at a time, so that
  // as many bytes are on their way.
  static std::span<const AttentionKernel> table() {
    static const AttentionKernel kernels[] = {
        kernel<64, 1, 2, 4, false>(),  kernel<64, 2, 2, 3, false>(), kernel<64, 4, 2, 2, false>(),
        kernel<80, 1, 2, 4, false>(),  kernel<80, 2, 2, 3, false>(), kernel<80, 4, 2, 2, true>(),
        kernel<96, 1, 1, 4, false>(),  kernel<96, 2, 1, 3, false>(), kernel<96, 4, 1, 2, true>(),
        kernel<128, 1, 1, 4, false>(), kernel<128, 2, 1, 3, true>(), kernel<128, 4, 1, 2, true>(),
        kernel<192, 1, 1, 3, false>(), kernel<192, 2, 1, 2, true>(), kernel<256, 1, 1, 2, false>(),
        kernel<256, 2, 1, 2, true>(),
    };
    return kernels;
  }
};

}  // namespace quantkit::cuda
