"""Rules on mixtures of experts: one kernel runs all experts of a layer."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.lint.engines import COMPRESSED_TENSORS, SERVERS, SGLANG, VLLM
from quantkit.lint.finding import Finding, error
from quantkit.lint.linears import PROJECTIONS, is_coded
from quantkit.lint.quantization import Group, strategy_of
from quantkit.lint.subject import Subject


def plain_experts(subject: Subject) -> Iterator[Finding]:
    """Experts that are stored together are one quantized layer for servers, unless ignored.

    vLLM: compressed_tensors_moe.py, get_moe_method asks for the names of the first expert; SGLang:
    compressed_tensors.py, get_moe_scheme; for fp8, is_layer_skipped of either.
    """
    quantization = subject.quantization
    if not subject.is_checked or not subject.linears.coded:
        return
    for name, entry in subject.folder.tensors.items():
        parent, found, _ = name.partition(".experts.")
        first = f"{parent}.experts.0.gate_proj"
        is_plain = len(entry.shape) == 3 and not is_coded(entry)
        if not found or not is_plain or name.rpartition(".")[2] not in PROJECTIONS:
            continue
        if quantization.group_of(first) is None:
            continue
        engines = tuple(
            e for e in subject.loaders(*SERVERS) if not quantization.may_ignore(e, first)
        )
        if engines:
            problem = f"is {entry.dtype}, and {quantization.ignore_key} does not name experts"
            yield error(
                "experts-not-ignored",
                engines,
                name,
                f"{problem}: the engine expects them in 8 bits",
                f"name the experts in {quantization.ignore_key}, or quantize them one by one",
            )


def split_experts(subject: Subject) -> Iterator[Finding]:
    """One kernel runs all experts of a layer (vLLM: compressed_tensors_moe.py, get_moe_method)."""
    for linears in subject.linears.experts():
        plain = [linear for linear in linears if not linear.is_coded]
        if plain and len(plain) < len(linears):
            problem = f"is {plain[0].weight.dtype}, and other experts of its layer are in 8 bits"
            advice = "quantize all experts of a layer, or none"
            engines = subject.loaders(*SERVERS)
            yield error("experts-split", engines, plain[0].weight.name, problem, advice)


def unsupported_scheme(subject: Subject) -> Iterator[Finding]:
    """Experts have fewer kernels than single linears.

    vLLM: compressed_tensors_moe_w8a8_fp8.py, __init__; SGLang: compressed_tensors_w8a8_fp8_moe.py,
    the same, and both fail on inputs that are not quantized.
    """
    if subject.quantization.method != COMPRESSED_TENSORS:
        return
    for linears in subject.linears.experts():
        group = linears[0].group
        if not linears[0].is_coded or group is None or _has_kernel(group):
            continue
        inputs = "unquantized" if group.inputs is None else strategy_of(group.inputs)
        problem = f"has weights per {group.strategy} and {inputs} inputs: no kernel for experts"
        advice = "use scales per channel with inputs per token, or blocks"
        engines = subject.loaders(VLLM, SGLANG)
        yield error("experts-scheme", engines, linears[0].weight.name, problem, advice)


def _has_kernel(group: Group) -> bool:
    if group.inputs is None:
        return False
    words = (group.strategy, strategy_of(group.inputs))
    is_dynamic_token = words == ("channel", "token") and not group.static_inputs
    return words == ("tensor", "tensor") or is_dynamic_token or group.strategy == "block"


RULES = (plain_experts, split_experts, unsupported_scheme)
