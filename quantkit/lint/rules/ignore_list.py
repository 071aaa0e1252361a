"""Rules on the ignore list: it says the same as the tensors, and means what it seems to."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.errors import nearest
from quantkit.lint.engines import (
    COMPRESSED_TENSORS,
    FP8,
    MODELOPT,
    SERVERS,
    SGLANG,
    TENSORRT,
    TRANSFORMERS,
    VLLM,
)
from quantkit.lint.finding import Finding, error, note, warning
from quantkit.lint.linears import Linear
from quantkit.lint.matching import PATTERN, compiled, is_explosive, is_regex
from quantkit.lint.subject import Subject

UNQUANTIZED_BY_VLLM = ("vision_tower", "vision_model", "vit_large_projector")


def ignored_but_coded(subject: Subject) -> Iterator[Finding]:
    """An ignored module has no parameter for a scale.

    vLLM: models/utils.py, AutoWeightsLoader raises on a tensor that the model has not. Elsewhere
    the codes are taken for values, without their scale.
    """
    quantization = subject.quantization
    if not subject.is_checked:
        return
    for linear in subject.linears.coded:
        entries = {e: quantization.ignoring(e, linear.module) for e in subject.loaders()}
        engines = tuple(engine for engine, found in entries.items() if found)
        if engines:
            entry = entries[engines[0]][0]
            problem = f"is in 8 bits, and {quantization.ignore_key} has {entry!r}"
            yield error(
                "ignored-but-quantized",
                engines,
                linear.weight.name,
                f"{problem}: the scale is not applied",
                _narrower(entry, quantization.ignore_key),
            )


def _narrower(entry: str, key: str) -> str:
    if is_regex(entry) and not entry.endswith("$"):
        return f"remove {entry!r} from {key}, or end it with $ and write its dots as \\."
    return f"remove {entry!r} from {key}"


def plain_and_not_ignored(subject: Subject) -> Iterator[Finding]:
    """A linear that is neither ignored nor in 8 bits gets parameters that no tensor fills.

    vLLM: compressed_tensors.py, get_scheme and fp8_utils.py, create_fp8_scale_parameter: the scale
    stays at the lowest float32. SGLang: the same files. TensorRT-LLM: _torch/modules/linear.py.
    transformers: a missing weight_scale; its fp8 linears run plain weights as they are
    (integrations/finegrained_fp8.py, FP8Linear.forward).
    """
    quantization = subject.quantization
    if not subject.is_checked or not subject.linears.coded:
        return
    key = quantization.ignore_key
    for linear in subject.linears.plain:
        if linear.group is None:
            continue
        engines = tuple(
            engine
            for engine in _expecting_codes(subject, linear)
            if not quantization.may_ignore(engine, linear.module)
        )
        if engines:
            problem = f"is {linear.weight.dtype}, and {key} does not name it"
            yield error(
                "unquantized-not-ignored",
                engines,
                linear.weight.name,
                f"{problem}: the engine expects 8 bits and a scale",
                f"add its module to {key}",
            )


def _expecting_codes(subject: Subject, linear: Linear) -> tuple[str, ...]:
    """Return the engines that expect a linear in 8 bits unless it is ignored."""
    method, engines = subject.quantization.method, subject.loaders()
    if linear.is_head:
        # Servers quantize a head by its class in modelopt's format only, else where it is named.
        named = subject.quantization.group_by_name(linear.module) is not None
        heads = {
            COMPRESSED_TENSORS: (VLLM, SGLANG, TRANSFORMERS) if named else (TRANSFORMERS,),
            MODELOPT: (VLLM, SGLANG),
        }
        wanted = heads.get(method, ())
        return tuple(e for e in engines if e in wanted)
    if method == FP8:
        engines = tuple(e for e in engines if e != TRANSFORMERS)
    if method == MODELOPT and any(part in linear.module for part in UNQUANTIZED_BY_VLLM):
        engines = tuple(e for e in engines if e != VLLM)
    return engines


def untargeted(subject: Subject) -> Iterator[Finding]:
    """SGLang: compressed_tensors/utils.py, find_matched_target raises for a linear of no group."""
    quantization = subject.quantization
    if quantization.method != COMPRESSED_TENSORS or not quantization.groups:
        return
    for linear in subject.linears.by_name.values():
        if linear.group is not None or linear.is_head:
            continue
        if linear.is_coded:
            engines, problem = subject.loaders(), "is in 8 bits, and no config group targets it"
        elif not quantization.may_ignore(SGLANG, linear.module):
            engines, problem = (SGLANG,), "is in no config group and not in ignore"
        else:
            continue
        yield error("untargeted", engines, linear.weight.name, problem, "target or ignore it")


def invalid_pattern(subject: Subject) -> Iterator[Finding]:
    """All engines give the text after re: to Python's re or to the regex package."""
    quantization = subject.quantization
    for entry in quantization.ignore:
        if not is_regex(entry) or compiled(entry.removeprefix(PATTERN)) is not None:
            continue
        place = subject.key(quantization.ignore_key)
        if is_explosive(entry):
            problem = f"has {entry[:80]!r}, which repeats a repetition: slow, and not tried here"
            yield warning("ignore-pattern", subject.loaders(), place, problem, "simplify it")
        else:
            problem = f"has {entry[:200]!r}, which is no regular expression"
            yield error("ignore-pattern", subject.loaders(), place, problem, "correct it")


def matches_nothing(subject: Subject) -> Iterator[Finding]:
    """A stale name is harmless where it is, and its module is not what was meant to be kept."""
    quantization = subject.quantization
    if not subject.is_checked:
        return
    modules = _modules(subject)
    used = {
        entry
        for engine in subject.loaders()
        for module in modules
        for entry in quantization.ignoring(engine, module)
    }
    for entry in quantization.ignore:
        if entry in used or _is_usual(subject, entry):
            continue
        place = subject.key(quantization.ignore_key)
        problem = f"has {entry[:200]!r}, which names no module{nearest(entry, modules)}"
        yield warning("ignore-matches-nothing", subject.loaders(), place, problem, "correct it")


def _is_usual(subject: Subject, entry: str) -> bool:
    """Whether an entry is written to be safe: a tied head, a class, a bad pattern (found above)."""
    is_bad = is_regex(entry) and compiled(entry.removeprefix(PATTERN)) is None
    return is_bad or "lm_head" in entry or "mtp" in entry or entry.isidentifier()


def _modules(subject: Subject) -> list[str]:
    """Return every module that has a tensor, and the modules above it."""
    names: dict[str, None] = {}
    for tensor in subject.folder.tensors:
        name = tensor.rpartition(".")[0]
        while name and name not in names:
            names[name] = None
            name = name.rpartition(".")[0]
    return list(names)


def split_group(subject: Subject) -> Iterator[Finding]:
    """Fused linears are all quantized or none.

    vLLM: compressed_tensors/utils.py, should_ignore_layer and quant_utils.py, is_layer_skipped
    raise; SGLang: the same files. TensorRT-LLM fuses them too.
    """
    for linears in subject.linears.fused():
        coded = [linear for linear in linears if linear.is_coded]
        if coded and len(coded) < len(linears):
            plain = next(linear for linear in linears if not linear.is_coded)
            problem = f"is {plain.weight.dtype}, and {coded[0].leaf} of the same layer is in 8 bits"
            yield error(
                "fused-group-split",
                subject.loaders(*SERVERS),
                plain.weight.name,
                f"{problem}: engines run them as one",
                "quantize all of them, or none",
            )


def ignored_in_part(subject: Subject) -> Iterator[Finding]:
    """An ignore list names a fused group whole, see `split_group`."""
    quantization = subject.quantization
    if not subject.is_checked:
        return
    for linears in subject.linears.fused():
        engines = tuple(e for e in subject.loaders(VLLM, SGLANG) if _splits(subject, e, linears))
        if engines:
            others = ", ".join(linear.leaf for linear in linears)
            problem = f"is of {others}, of which {quantization.ignore_key} names only some"
            yield error(
                "ignore-splits-group",
                engines,
                linears[0].module,
                f"{problem}: the engine refuses to start",
                "name all of them, or none",
            )


def _splits(subject: Subject, engine: str, linears: list[Linear]) -> bool:
    named = [bool(subject.quantization.ignoring(engine, linear.module)) for linear in linears]
    return any(named) and not all(named)


def patterns_for_tensorrt(subject: Subject) -> Iterator[Finding]:
    """TensorRT-LLM: models/modeling_utils.py, is_module_excluded_from_quantization.

    Versions that compared with fnmatch alone took no notice of re: entries.
    """
    entries = [entry for entry in subject.quantization.ignore if is_regex(entry)]
    if entries and subject.quantization.method == COMPRESSED_TENSORS:
        problem = f"has {entries[0][:80]!r}: older TensorRT-LLM takes no notice of re: entries"
        place = subject.key(subject.quantization.ignore_key)
        yield note("ignore-regex", (TENSORRT,), place, problem, "list the modules by name for it")


RULES = (
    ignored_but_coded,
    plain_and_not_ignored,
    untargeted,
    invalid_pattern,
    matches_nothing,
    split_group,
    ignored_in_part,
    patterns_for_tensorrt,
)
