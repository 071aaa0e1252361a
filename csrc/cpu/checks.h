// Argument checks of the CPU ops: the shared ones, and that tensors are on the CPU.
#pragma once

#include "../checks.h"
#include "kernels.h"

namespace quantkit {

inline void check_layout(const char* op, const char* argument, const Tensor& tensor) {
  if (!tensor.is_cpu()) fail(op, argument, "on the CPU like x", "a tensor on another device");
  check_contiguous(op, argument, tensor);
}

inline void check_rows(const char* op, const char* argument, const Tensor& tensor) {
  if (!tensor.is_cpu()) fail(op, argument, "on the CPU", "a tensor on another device");
  check_side_by_side(op, argument, tensor);
}

}  // namespace quantkit
