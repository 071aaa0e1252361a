"""The engines that a checkpoint is checked for, and the quantization methods that each one knows.

Read from vLLM 0.32, SGLang 0.5.23, transformers 5.24 with compressed-tensors 0.17 to 0.20, and
TensorRT-LLM's PyTorch backend. A rule's docstring names the function that it mirrors.
"""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.errors import UnsupportedError, nearest

VLLM, SGLANG, TRANSFORMERS, TENSORRT = "vllm", "sglang", "transformers", "tensorrt-llm"
ENGINES = (VLLM, SGLANG, TRANSFORMERS, TENSORRT)
SERVERS = (VLLM, SGLANG, TENSORRT)

COMPRESSED_TENSORS, FP8, MODELOPT = "compressed-tensors", "fp8", "modelopt"
FBGEMM, NATIVE = "fbgemm_fp8", "quantkit"

KNOWN_BY: dict[str, tuple[str, ...]] = {
    COMPRESSED_TENSORS: ENGINES,
    FP8: ENGINES,
    MODELOPT: SERVERS,
    FBGEMM: (VLLM, TRANSFORMERS),
    "quark": (VLLM, SGLANG, TRANSFORMERS),
    "torchao": (VLLM, TRANSFORMERS),
    "mxfp8": (SGLANG, TRANSFORMERS, TENSORRT),
    "awq": (VLLM, SGLANG, TRANSFORMERS),
    "gptq": (VLLM, SGLANG, TRANSFORMERS),
    "mxfp4": ENGINES,
}
"""Which engines load a quant_method.

vLLM: layers/quantization/__init__.py, QuantizationMethods. SGLang: the same file,
BASE_QUANTIZATION_METHODS. transformers: quantizers/auto.py, AUTO_QUANTIZER_MAPPING. TensorRT-LLM:
_torch/model_config.py, load_hf_quant_config.
"""
CHECKED_METHODS = (COMPRESSED_TENSORS, FP8, MODELOPT)
"""Methods whose tensors and configuration have rules; of others only the files are checked."""


def check_engines(names: Iterable[str]) -> tuple[str, ...]:
    """Return the engines, each once; raises UnsupportedError for an unknown one, or for none."""
    chosen = tuple(dict.fromkeys(names))
    for name in chosen:
        if name not in ENGINES:
            hint = nearest(name, ENGINES)
            raise UnsupportedError(f"engine {name!r} is not known{hint}; use {', '.join(ENGINES)}")
    if not chosen:
        raise UnsupportedError(f"no engine to check for; known: {', '.join(ENGINES)}")
    return chosen
