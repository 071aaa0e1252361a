"""Rules on the numbers in scales: usable, exact, and equal where engines want one for several."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from quantkit.lint.engines import (
    COMPRESSED_TENSORS,
    ENGINES,
    MODELOPT,
    SGLANG,
    TENSORRT,
    TRANSFORMERS,
    VLLM,
)
from quantkit.lint.finding import Finding, error, note, warning
from quantkit.lint.linears import Linear
from quantkit.lint.numbers import Numbers, is_bfloat16
from quantkit.lint.subject import Subject
from quantkit.tensor_file import TensorEntry

AGAIN = "quantize again: this scale was never computed or was damaged"
FLOATS = {"F32", "BF16", "F16", "F64"}
LARGEST = {"weight": 1e2, "input": 1e4}
"""Above these a scale of FP8 means weights of 4e4, or inputs of 4e6."""
SMALLEST = 1e-20


def scale_values(subject: Subject) -> Iterator[Finding]:
    """Scales are finite and > 0; what is not comes out as NaN or garbage in every engine."""
    for linear in subject.linears.coded:
        scale = subject.linears.scale_of(linear)
        if scale is not None:
            yield from _judged(subject, scale, "weight")
        entry = subject.folder.tensors.get(f"{linear.module}.input_scale")
        if entry is not None:
            yield from _judged(subject, entry, "input")


def _judged(subject: Subject, entry: TensorEntry, kind: str) -> Iterator[Finding]:
    if entry.dtype not in FLOATS | {"F8_E8M0", "U8"}:
        problem = f"is {entry.dtype}, no floating-point number"
        yield error("scale-dtype", ENGINES, entry.name, problem, "store it as F32")
    values = subject.folder.numbers(entry.name)
    if values is None or not values.size:
        return
    if not np.isfinite(values).all() or (values < 0).any():
        yield error("scale-invalid", ENGINES, entry.name, _first_bad(values), AGAIN)
    elif (values == 0).any():
        yield from _zeros(entry, values, kind)
    elif values.max() > LARGEST[kind] or values.min() < SMALLEST:
        problem = f"has values from {values.min():.3g} to {values.max():.3g}, which no model needs"
        yield warning("scale-absurd", ENGINES, entry.name, problem, AGAIN)


def _first_bad(values: Numbers) -> str:
    bad = values[~np.isfinite(values) | (values < 0)]
    return f"has {bad.size} of {values.size} values that are not finite and > 0 (first: {bad[0]})"


def _zeros(entry: TensorEntry, values: Numbers, kind: str) -> Iterator[Finding]:
    count = f"{int((values == 0).sum())} of {values.size}"
    if kind == "input" or values.size == 1:
        problem = f"has {count} values of 0: the engine divides by it"
        yield error("scale-zero", ENGINES, entry.name, problem, AGAIN)
    else:
        problem = f"has {count} values of 0: right for rows of zeros only"
        yield warning("scale-zero", ENGINES, entry.name, problem, AGAIN)


def scale_rounded(subject: Subject) -> Iterator[Finding]:
    """transformers: core_model_loading.py casts scales to the parameter's dtype, bfloat16."""
    if subject.quantization.method != COMPRESSED_TENSORS:
        return
    for linear in subject.linears.coded:
        scale = subject.linears.scale_of(linear)
        values = (
            None if scale is None or scale.dtype != "F32" else subject.folder.numbers(scale.name)
        )
        if scale is not None and values is not None and np.isfinite(values).all():
            count = int((~is_bfloat16(values)).sum())
            if count:
                problem = (
                    f"has {count} of {values.size} values that bfloat16 rounds: up to 0.4 % off"
                )
                advice = "nothing, or write scales that bfloat16 holds exactly"
                yield note("scale-not-bf16", (TRANSFORMERS,), scale.name, problem, advice)


def fused_scales(subject: Subject) -> Iterator[Finding]:
    """Fused linears with one scale each are rounded a second time, to the largest of them.

    vLLM: w8a8_utils.py, requantize_with_max_scale, and the largest input_scale; SGLang: the same.
    TensorRT-LLM: _torch/modules/linear.py, rescale_fused_weights, in modelopt's format.
    """
    for leaf, effect in (("weight_scale", "rounded twice"), ("input_scale", "rounded coarser")):
        found = [
            (max(values) / min(values), linears)
            for linears in subject.linears.fused()
            if (values := _single_values(subject, linears, leaf))
        ]
        for factor, linears in sorted(found, key=lambda pair: -pair[0]):  # the worst comes first
            if factor > 1:
                names = ", ".join(linear.leaf for linear in linears)
                problem = f"differs among {names} by a factor of {factor:.3g}"
                yield warning(
                    "fused-scales-differ",
                    _fusing(subject),
                    f"{linears[0].module}.{leaf}",
                    f"{problem}: the engine takes the largest, the others are {effect}",
                    f"quantize fused linears with one common {leaf}",
                )


def _fusing(subject: Subject) -> tuple[str, ...]:
    is_modelopt = subject.quantization.method == MODELOPT
    return subject.loaders(VLLM, SGLANG, *((TENSORRT,) if is_modelopt else ()))


def _single_values(subject: Subject, linears: list[Linear], leaf: str) -> list[float]:
    """Return the one scale of each linear, or nothing where they have more or none."""
    if not all(linear.group and linear.group.strategy == "tensor" for linear in linears):
        return []
    found = [subject.folder.numbers(f"{linear.module}.{leaf}") for linear in linears]
    values = [float(v[0]) for v in found if v is not None and v.size == 1 and 0 < v[0] < np.inf]
    return values if len(values) == len(linears) else []


RULES = (scale_values, scale_rounded, fused_scales)
