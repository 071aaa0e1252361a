"""Rules on the quantization method as a whole: who knows it, and whether it is declared at all."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.lint.engines import CHECKED_METHODS, ENGINES, FBGEMM, KNOWN_BY, NATIVE, VLLM
from quantkit.lint.finding import Finding, error, note, warning
from quantkit.lint.folder import CONFIG_NAME
from quantkit.lint.subject import Subject


def not_declared(subject: Subject) -> Iterator[Finding]:
    """Engines take a checkpoint without quantization_config for an unquantized one."""
    if subject.quantization.method or subject.quantization.block:
        return
    if subject.linears.coded:
        name = subject.linears.coded[0].weight.name
        problem = f"has no quantization_config, and {name} is in 8 bits"
        advice = "restore the quantization_config, or export the checkpoint again"
        yield error("not-declared", ENGINES, CONFIG_NAME, problem, advice)
    else:
        problem = "has no quantization_config: an unquantized model, only its files were checked"
        yield note("not-quantized", ENGINES, CONFIG_NAME, problem)


def unknown_method(subject: Subject) -> Iterator[Finding]:
    """Each engine has a table of the methods it knows, see `engines.KNOWN_BY`."""
    quantization = subject.quantization
    if not quantization.block:
        return
    place, method = subject.key("quant_method"), quantization.method
    if method == NATIVE:
        problem = f"is {NATIVE!r}: no engine but quantkit loads it"
        yield error("native-checkpoint", ENGINES, place, problem, "run 'quantkit export' on it")
        return
    unable = tuple(engine for engine in ENGINES if engine not in KNOWN_BY.get(method, ()))
    if unable:
        problem = f"is {quantization.block.get('quant_method')!r}, which the engine does not know"
        yield error("unknown-method", unable, place, problem, "export to a format that it knows")
    if method not in CHECKED_METHODS and len(unable) < len(ENGINES):
        problem = f"is {method!r}: quantkit has no rules for it, only the files were checked"
        yield note("not-checked", subject.loaders(), place, problem)


def deprecated_method(subject: Subject) -> Iterator[Finding]:
    """vLLM: quantization/__init__.py, DEPRECATED_QUANTIZATION_METHODS."""
    if subject.quantization.method == FBGEMM:
        problem = "is 'fbgemm_fp8', which vLLM loads with --allow-deprecated-quantization only"
        advice = "export to compressed-tensors"
        yield warning("deprecated-method", (VLLM,), subject.key("quant_method"), problem, advice)


RULES = (not_declared, unknown_method, deprecated_method)
