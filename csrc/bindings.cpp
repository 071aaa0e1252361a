// Registration only: the C++ kernels of the CPU ops. Their schemas are defined in quantkit/ops.py.

#include <torch/csrc/stable/library.h>

#include "cpu/ops.h"

STABLE_TORCH_LIBRARY_IMPL(quantkit, CPU, library) {
  library.impl("fp8_linear", TORCH_BOX(&quantkit::fp8_linear));
  library.impl("fp8_gated_linear", TORCH_BOX(&quantkit::fp8_gated_linear));
  library.impl("dequantize_weight", TORCH_BOX(&quantkit::dequantize_weight));
}
