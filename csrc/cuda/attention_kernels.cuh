// A row of a table of kernels; attention_<type>.cu.
#pragma once

#include "attention.cuh"

namespace quantkit::cuda {

template <class Shape>
AttentionKernel attention_kernel() {
  return {.attend = &attend<Shape>,
          .head_dim = Shape::kHeadDim,
          .rows = Shape::kRows,
          .chunk = Shape::kChunk,
          .threads = Shape::kThreads,
          .shared_bytes = Shape::kSharedBytes};
}

}  // namespace quantkit::cuda
