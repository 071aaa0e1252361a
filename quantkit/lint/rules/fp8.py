"""Rules on the `fp8` block of config.json (DeepSeek's blocks, AutoFP8's tensors)."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.lint.documents import strings
from quantkit.lint.engines import FP8, SGLANG, TENSORRT, TRANSFORMERS, VLLM
from quantkit.lint.finding import Finding, error, warning
from quantkit.lint.quantization import pair
from quantkit.lint.subject import Subject

SERVERS = (VLLM, SGLANG)


def activation_scheme(subject: Subject) -> Iterator[Finding]:
    """In vLLM and SGLang: fp8.py, Fp8Config; transformers: FineGrainedFP8Config.post_init."""
    if subject.quantization.method != FP8:
        return
    block = subject.quantization.block
    scheme, place = block.get("activation_scheme"), subject.key("activation_scheme")
    if "activation_scheme" not in block:
        problem = "is missing, and the engine refuses to start"
        yield error("activation-scheme", SERVERS, place, problem, "write 'dynamic' or 'static'")
    elif scheme not in ("dynamic", "static"):
        problem = f"is {scheme!r}, expected 'dynamic' or 'static'"
        engines = (*SERVERS, TRANSFORMERS)
        yield error("activation-scheme", engines, place, problem[:200], "correct it")
    elif scheme == "static" and block.get("weight_block_size") is not None:
        problem = "is 'static', and blocks have dynamic inputs"
        yield error("activation-scheme", SERVERS, place, problem, "write 'dynamic'")


def block_size(subject: Subject) -> Iterator[Finding]:
    """In vLLM and SGLang: Fp8Config; TensorRT-LLM: load_hf_quant_config asserts (128, 128)."""
    if subject.quantization.method != FP8:
        return
    given = subject.quantization.block.get("weight_block_size")
    place = subject.key("weight_block_size")
    if given is None:
        return
    if pair(given) is None:
        problem = f"is {given!r}, expected two numbers"
        yield error("block-size", subject.loaders(), place, problem[:200], "write [128, 128]")
    elif pair(given) != (128, 128):
        problem = f"is {given!r}; the engine has kernels for [128, 128] only"
        yield error("block-size", (TENSORRT,), place, problem[:200], "export with 128 x 128")


def per_tensor(subject: Subject) -> Iterator[Finding]:
    """One scale per tensor is no common format.

    transformers: FineGrainedFP8Config takes a missing weight_block_size for (128, 128), and names
    the scale weight_scale_inv. TensorRT-LLM: load_hf_quant_config quantizes nothing without blocks
    or static inputs.
    """
    block = subject.quantization.block
    if subject.quantization.method != FP8 or block.get("weight_block_size") is not None:
        return
    place = subject.key("weight_block_size")
    if "weight_block_size" not in block:
        problem = "is missing, and transformers then expects blocks of 128 x 128"
        yield error("fp8-per-tensor", (TRANSFORMERS,), place, problem, "export to another format")
    elif any(name.endswith(".weight_scale") for name in subject.folder.tensors):
        problem = "is null, and transformers then reads weight_scale_inv, not weight_scale"
        yield error("fp8-per-tensor", (TRANSFORMERS,), place, problem, "export to another format")
    if block.get("activation_scheme") != "static":
        problem = "is not set, and with dynamic inputs the engine then loads no scales"
        yield error("fp8-per-tensor", (TENSORRT,), place, problem, "export to another format")


def two_ignore_lists(subject: Subject) -> Iterator[Finding]:
    """One of two lists is read: vLLM ignored_layers first, transformers the other first.

    TensorRT-LLM merges them (_torch/model_config.py, load_hf_quant_config).
    """
    block = subject.quantization.block
    first = set(strings(block.get("ignored_layers")))
    second = set(strings(block.get("modules_to_not_convert")))
    if subject.quantization.method == FP8 and first and second and first != second:
        problem = "differs from modules_to_not_convert, and engines read one of them each"
        place = subject.key("ignored_layers")
        yield warning("two-ignore-lists", subject.loaders(), place, problem, "write one list")


RULES = (activation_scheme, block_size, per_tensor, two_ignore_lists)
