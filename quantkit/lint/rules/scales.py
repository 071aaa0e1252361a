"""Rules on 8-bit weights and their scales: there, named, shaped and sized as engines expect."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from quantkit.lint.engines import (
    COMPRESSED_TENSORS,
    ENGINES,
    FP8,
    MODELOPT,
    SGLANG,
    TENSORRT,
    TRANSFORMERS,
    VLLM,
)
from quantkit.lint.finding import Finding, error, note, warning
from quantkit.lint.linears import SCALE_NAMES, WEIGHT, Linear, is_coded
from quantkit.lint.numbers import Numbers, is_bfloat16
from quantkit.lint.subject import Subject
from quantkit.tensor_file import TensorEntry

AGAIN = "quantize again: this scale was never computed or was damaged"
FLOATS = {"F32", "BF16", "F16", "F64"}
LARGEST = {"weight": 1e2, "input": 1e4}
"""Above these a scale of FP8 means weights of 4e4, or inputs of 4e6."""
SMALLEST = 1e-20


def weight_dtype(subject: Subject) -> Iterator[Finding]:
    """Parameters are float8_e4m3fn everywhere.

    vLLM: fp8_utils.py, create_fp8_weight_parameter; compressed-tensors: quant_args.py,
    pytorch_dtype. Other 8-bit formats are converted on loading, which rounds or overflows.
    """
    for linear in subject.linears.coded:
        if subject.is_checked and linear.weight.dtype != "F8_E4M3":
            problem = f"is {linear.weight.dtype}, and engines hold F8_E4M3"
            advice = "store it as F8_E4M3"
            yield error("weight-dtype", subject.loaders(), linear.weight.name, problem, advice)


def coded_elsewhere(subject: Subject) -> Iterator[Finding]:
    """Only weights of linear layers are in 8 bits; all else has no scale that is applied."""
    if not subject.is_checked:
        return
    linears = {f"{module}{WEIGHT}" for module in subject.linears.by_name}
    for entry in subject.folder.tensors.values():
        is_experts = len(entry.shape) == 3
        if is_coded(entry) and entry.name not in linears and not is_experts:
            problem = f"is {entry.dtype} {list(entry.shape)}, and is no matrix of a linear layer"
            yield error(
                "fp8-not-linear", subject.loaders(), entry.name, problem, "store it in 16 bits"
            )


def scale_missing(subject: Subject) -> Iterator[Finding]:
    """Without its scale a weight means nothing: vLLM and SGLang go on with the lowest float32.

    The name depends on the container: weight_scale_inv for blocks of `fp8` (vLLM: fp8.py,
    create_weights), and for all of `fp8` in transformers (finegrained_fp8.py, FP8Linear).
    """
    if not subject.is_checked:
        return
    tensors, expected = subject.folder.tensors, subject.quantization.scale_name
    for linear in subject.linears.coded:
        name = f"{linear.module}.{expected}"
        other = subject.linears.scale_of(linear)
        if name in tensors:
            continue
        if other is None:
            problem, rule = f"is in 8 bits, and {name} is not there", "scale-missing"
            yield error(rule, subject.loaders(), linear.weight.name, problem, AGAIN)
        else:
            engines = tuple(e for e in subject.loaders() if not _reads(e, subject, other.name))
            problem = f"should be called {expected} for this container"
            yield error("scale-name", engines, other.name, problem, f"rename it to .{expected}")


def _reads(engine: str, subject: Subject, name: str) -> bool:
    """Whether an engine takes the other name as well."""
    per_tensor_fp8 = subject.quantization.method == FP8 and name.endswith("_inv")
    return engine == TENSORRT or (engine == TRANSFORMERS and per_tensor_fp8)


def scale_orphaned(subject: Subject) -> Iterator[Finding]:
    """vLLM: models/utils.py, AutoWeightsLoader raises on a tensor that the model has not."""
    coded = {linear.module for linear in subject.linears.coded}
    for name, entry in subject.folder.tensors.items():
        module, _, leaf = name.rpartition(".")
        is_scale = leaf in SCALE_NAMES or leaf == "input_scale"
        if is_scale and subject.is_checked and module not in coded and len(entry.shape) < 3:
            problem = f"is a scale, and {module}{WEIGHT} is not in 8 bits"
            yield error("scale-without-weight", (VLLM,), name, problem, "remove it")


def scale_shape(subject: Subject) -> Iterator[Finding]:
    """Shapes are compared exactly where they are copied.

    vLLM and SGLang: parameter.py, _load_into_shard_id ([1] or none), load_merged_column_weight and
    load_row_parallel_weight ([N, 1], grid). transformers: compressed-tensors' parameters, and a
    shape that differs is an error of from_pretrained. TensorRT-LLM flattens channel scales.
    """
    for linear in subject.linears.coded:
        scale = subject.linears.scale_of(linear)
        expected = linear.group and linear.group.scale_shape(linear.rows, linear.columns)
        if scale is None or not expected or not subject.is_checked:
            continue
        if subject.quantization.method == MODELOPT and len(expected) == 2 and expected[1] == 1:
            expected = (linear.rows,)
        engines = _refusing(subject, scale.shape, expected)
        if engines:
            shape, wanted = list(scale.shape), list(expected)
            problem = f"has shape {shape}, expected {wanted} for {_described(linear)}"
            if scale.shape == expected[::-1] != expected:
                problem += ": it is transposed"
            yield error("scale-shape", engines, scale.name, problem, f"store it as {wanted}")


def _described(linear: Linear) -> str:
    strategy = linear.group.strategy if linear.group else None
    return f"{strategy} scales of a weight {list(linear.weight.shape)}"


def _refusing(
    subject: Subject, shape: tuple[int, ...], expected: tuple[int, ...]
) -> tuple[str, ...]:
    engines = subject.loaders()
    if shape == expected:
        return ()
    if expected == (1,) and shape == ():
        # Servers take a scalar; compressed-tensors has [1], transformers' own fp8 a scalar.
        strict = subject.quantization.method == COMPRESSED_TENSORS
        return tuple(e for e in engines if strict and e == TRANSFORMERS)
    if shape == expected[:1] and expected[1:] == (1,):
        return tuple(e for e in engines if e != TENSORRT)
    return engines


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


def input_scale_missing(subject: Subject) -> Iterator[Finding]:
    """Without it, servers go on with the lowest float32 (vLLM: create_fp8_input_scale).

    SGLang's modelopt has no other inputs (modelopt_quant.py, process_weights_after_loading).
    """
    for linear in subject.linears.coded:
        if not subject.is_checked or linear.group is None or linear.group.strategy is None:
            continue
        name = f"{linear.module}.input_scale"
        engines = subject.loaders()
        if linear.group.static_inputs and name not in subject.folder.tensors:
            if subject.quantization.method == FP8:  # transformers calls it activation_scale
                engines = tuple(e for e in engines if e != TRANSFORMERS)
            problem = "is declared static, and is not there"
            yield error("input-scale-missing", engines, name, problem, "calibrate the inputs")
        elif not linear.group.static_inputs and name in subject.folder.tensors:
            problem = "is there, and inputs are declared dynamic: it is not used"
            yield warning("input-scale-unused", subject.loaders(), name, problem, "remove it")


def input_scale_shape(subject: Subject) -> Iterator[Finding]:
    """In vLLM and SGLang: parameter.py, _load_into_shard_id takes one number."""
    for linear in subject.linears.coded:
        entry = subject.folder.tensors.get(f"{linear.module}.input_scale")
        if entry is None or not subject.is_checked or entry.shape in ((), (1,)):
            continue
        problem = f"has shape {list(entry.shape)}, expected [1]"
        yield error("input-scale-shape", subject.loaders(), entry.name, problem, "store one number")


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


RULES = (
    weight_dtype,
    coded_elsewhere,
    scale_missing,
    scale_orphaned,
    scale_shape,
    scale_values,
    scale_rounded,
    input_scale_missing,
    input_scale_shape,
    fused_scales,
)
