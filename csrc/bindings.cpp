// Registration only: the C++ kernels of the CPU ops. Their schemas are defined in Python, in
// quantkit/ops.py and quantkit/attention_ops.py.

#include <torch/csrc/stable/library.h>

#include "cpu/ops.h"

STABLE_TORCH_LIBRARY_IMPL(quantkit, CPU, library) {
  library.impl("fp8_linear", TORCH_BOX(&quantkit::fp8_linear));
  library.impl("fp8_gated_linear", TORCH_BOX(&quantkit::fp8_gated_linear));
  library.impl("linear", TORCH_BOX(&quantkit::linear));
  library.impl("gated_linear", TORCH_BOX(&quantkit::gated_linear));
  library.impl("multiplies_many_rows", TORCH_BOX(&quantkit::multiplies_many_rows));
  library.impl("dequantize_weight", TORCH_BOX(&quantkit::dequantize_weight));
  library.impl("decoder_step", TORCH_BOX(&quantkit::decoder_step));
  library.impl("head_step", TORCH_BOX(&quantkit::head_step));
  library.impl("expert_mlps", TORCH_BOX(&quantkit::expert_mlps));
  library.impl("rms_norm", TORCH_BOX(&quantkit::rms_norm));
  library.impl("add_rms_norm", TORCH_BOX(&quantkit::add_rms_norm));
  library.impl("gate_mul", TORCH_BOX(&quantkit::gate_mul));
  library.impl("rotary", TORCH_BOX(&quantkit::rotary));
  library.impl("kv_append", TORCH_BOX(&quantkit::kv_append));
  library.impl("paged_attention", TORCH_BOX(&quantkit::paged_attention));
  library.impl("argmax_rows", TORCH_BOX(&quantkit::argmax_rows));
  library.impl("sample_gumbel", TORCH_BOX(&quantkit::sample_gumbel));
  library.impl("draw_rows", TORCH_BOX(&quantkit::draw_rows));
  library.impl("round_rows", TORCH_BOX(&quantkit::round_rows));
  library.impl("scale_errors", TORCH_BOX(&quantkit::scale_errors));
  library.impl("feed_back", TORCH_BOX(&quantkit::feed_back));
  library.impl("gram", TORCH_BOX(&quantkit::gram));
  library.impl("read_memory", TORCH_BOX(&quantkit::read_memory));
}
