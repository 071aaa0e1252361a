// One of the two halves of a paged KV cache, keys or values, as kernels that append are told of it.
#pragma once

#include "intrinsics.cuh"

namespace quantkit::cuda {

struct CacheSide {
  uint8_t* cache;        // [blocks, block_size, kv_heads, head_dim]
  const float* scale;    // null for plain values
  int64_t scale_stride;  // 0: one for all heads
};

// One of two, by its members: choosing between addresses would put both into local memory.
QK_DEVICE CacheSide choose(bool second, const CacheSide& a, const CacheSide& b) {
  return {second ? b.cache : a.cache, second ? b.scale : a.scale,
          second ? b.scale_stride : a.scale_stride};
}

}  // namespace quantkit::cuda
