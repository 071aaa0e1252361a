// Registration only: the CUDA kernels of ops whose schemas are defined in Python.

#include <torch/csrc/stable/library.h>

#include "ops.h"

STABLE_TORCH_LIBRARY_IMPL(quantkit, CUDA, library) {
  library.impl("fp8_linear", TORCH_BOX(&quantkit::cuda::fp8_linear));
  library.impl("fp8_gated_linear", TORCH_BOX(&quantkit::cuda::fp8_gated_linear));
  library.impl("dequantize_weight", TORCH_BOX(&quantkit::cuda::dequantize_weight));
  library.impl("scaled_mm", TORCH_BOX(&quantkit::cuda::scaled_mm));
  library.impl("scaled_mm_tile", TORCH_BOX(&quantkit::cuda::scaled_mm_tile));  // bench/gpu_tiles.py
  library.impl("scaled_gated_mm", TORCH_BOX(&quantkit::cuda::scaled_gated_mm));
  library.impl("block_scaled_mm", TORCH_BOX(&quantkit::cuda::block_scaled_mm));
  library.impl("rms_norm", TORCH_BOX(&quantkit::cuda::rms_norm));
  library.impl("add_rms_norm", TORCH_BOX(&quantkit::cuda::add_rms_norm));
  library.impl("rms_norm_quantize", TORCH_BOX(&quantkit::cuda::rms_norm_quantize));
  library.impl("add_rms_norm_quantize", TORCH_BOX(&quantkit::cuda::add_rms_norm_quantize));
  library.impl("quantize_rows", TORCH_BOX(&quantkit::cuda::quantize_rows));
  library.impl("gate_mul", TORCH_BOX(&quantkit::cuda::gate_mul));
  library.impl("gate_mul_quantize", TORCH_BOX(&quantkit::cuda::gate_mul_quantize));
  library.impl("rotary", TORCH_BOX(&quantkit::cuda::rotary));
  library.impl("kv_append", TORCH_BOX(&quantkit::cuda::kv_append));
  library.impl("rotary_append", TORCH_BOX(&quantkit::cuda::rotary_append));
  library.impl("kv_gather", TORCH_BOX(&quantkit::cuda::kv_gather));
  library.impl("fp8_qkv_append", TORCH_BOX(&quantkit::cuda::fp8_qkv_append));
  library.impl("paged_attention", TORCH_BOX(&quantkit::cuda::paged_attention));
  library.impl("argmax_rows", TORCH_BOX(&quantkit::cuda::argmax_rows));
  library.impl("sample_gumbel", TORCH_BOX(&quantkit::cuda::sample_gumbel));
  library.impl("nucleus_bound", TORCH_BOX(&quantkit::cuda::nucleus_bound));
}
