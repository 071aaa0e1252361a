"""Rules on 8-bit weights and their scales: there, named, shaped and sized as engines expect."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.lint.engines import (
    COMPRESSED_TENSORS,
    FP8,
    MODELOPT,
    TENSORRT,
    TRANSFORMERS,
    VLLM,
)
from quantkit.lint.finding import Finding, error, warning
from quantkit.lint.linears import SCALE_NAMES, WEIGHT, Linear, is_coded
from quantkit.lint.subject import Subject

AGAIN = "quantize again: this scale was never computed or was damaged"


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
        if other is None and _is_with_others(subject, linear):
            yield from _stored_together(subject, linear, f"store one {expected} for each expert")
        elif other is None:
            problem = f"is in 8 bits, and {name} is not there"
            yield error("scale-missing", subject.loaders(), linear.weight.name, problem, AGAIN)
        else:
            engines = tuple(e for e in subject.loaders() if not _reads(e, subject, other.name))
            problem = f"should be called {expected} for this container"
            yield error("scale-name", engines, other.name, problem, f"rename it to .{expected}")


def _stored_together(subject: Subject, linear: Linear, advice: str) -> Iterator[Finding]:
    rule, place = "scale-of-all-experts", linear.weight.name
    problem = "has its scale in one tensor with those of all experts"
    servers = tuple(engine for engine in subject.loaders() if engine != TRANSFORMERS)
    yield error(rule, servers, place, f"{problem}: the engine looks for one each", advice)
    if TRANSFORMERS in subject.loaders():
        problem += ": transformers 5.24 drops it where it dequantizes, without a GPU"
        yield warning(rule, (TRANSFORMERS,), place, problem, advice)


def _is_with_others(subject: Subject, linear: Linear) -> bool:
    """Whether scales of all experts are one tensor: integrations/finegrained_fp8.py, FP8Experts."""
    parent, found, _ = linear.module.partition(".experts.")
    names = (f"{parent}.experts.{leaf}_scale_inv" for leaf in ("gate_up_proj", "down_proj"))
    return bool(found) and any(name in subject.folder.tensors for name in names)


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
            yield from _unused(subject, name)


def _unused(subject: Subject, name: str) -> Iterator[Finding]:
    """Yield what a scale means that no engine has a use for, see `scale_orphaned` on vLLM."""
    problem, advice = "is there, and inputs are declared dynamic", "remove it"
    refusing = subject.loaders(VLLM)
    yield error(
        "input-scale-unused", refusing, name, f"{problem}: the engine refuses to load it", advice
    )
    others = tuple(engine for engine in subject.loaders() if engine != VLLM)
    yield warning("input-scale-unused", others, name, f"{problem}: it is not used", advice)


def input_scale_shape(subject: Subject) -> Iterator[Finding]:
    """In vLLM and SGLang: parameter.py, _load_into_shard_id takes one number."""
    for linear in subject.linears.coded:
        entry = subject.folder.tensors.get(f"{linear.module}.input_scale")
        if entry is None or not subject.is_checked or entry.shape in ((), (1,)):
            continue
        problem = f"has shape {list(entry.shape)}, expected [1]"
        yield error("input-scale-shape", subject.loaders(), entry.name, problem, "store one number")


RULES = (
    weight_dtype,
    coded_elsewhere,
    scale_missing,
    scale_orphaned,
    scale_shape,
    input_scale_missing,
    input_scale_shape,
)
