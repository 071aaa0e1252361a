"""Rules on the `compressed-tensors` block of config.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quantkit.errors import nearest
from quantkit.lint.documents import mapping, strings, whole_number
from quantkit.lint.engines import COMPRESSED_TENSORS, SGLANG, TENSORRT, TRANSFORMERS, VLLM
from quantkit.lint.finding import Finding, error, note
from quantkit.lint.matching import PATTERN, compiled, is_regex
from quantkit.lint.quantization import Group, names_linears, pair, strategy_of
from quantkit.lint.subject import Subject

PYDANTIC = (VLLM, SGLANG, TRANSFORMERS)
"""Engines that parse the block with compressed-tensors' own classes; TensorRT-LLM does not."""
ARGUMENT_KEYS = (
    *("num_bits", "type", "symmetric", "strategy", "dynamic", "group_size", "block_structure"),
    *("actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
)
GROUP_KEYS = ("targets", "weights", "input_activations", "output_activations", "format")
ARGUMENTS = ("weights", "input_activations", "output_activations")
STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")
FORMATS = (
    *("dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision"),
)
FP8_FORMATS = ("float-quantized", "naive-quantized", "int-quantized", "nvfp4-pack-quantized")
"""Formats under which vLLM and SGLang look for FP8 schemes at all."""


def unknown_key(subject: Subject) -> Iterator[Finding]:
    """compressed-tensors: quant_args.py and quant_scheme.py forbid extra fields, 0.15 to 0.20."""
    for place, fields, known in _blocks(subject):
        for key in fields:
            if key not in known:
                problem = f"is unknown{nearest(key, known)}, and refused"
                yield error("unknown-key", PYDANTIC, f"{place}.{key}", problem, "remove the key")


def _blocks(subject: Subject) -> Iterator[tuple[str, dict[str, Any], tuple[str, ...]]]:
    """Yield the place, the fields and the known keys of every group and every argument block."""
    if subject.quantization.method != COMPRESSED_TENSORS:
        return
    for name, value in mapping(subject.quantization.block.get("config_groups")).items():
        place = subject.key("config_groups", name)
        if isinstance(value, dict):
            yield place, value, GROUP_KEYS
    yield from _argument_blocks(subject)


def _argument_blocks(subject: Subject) -> Iterator[tuple[str, dict[str, Any], tuple[str, ...]]]:
    if subject.quantization.method != COMPRESSED_TENSORS:
        return
    for name, value in mapping(subject.quantization.block.get("config_groups")).items():
        for key in ARGUMENTS:
            fields = mapping(value).get(key)
            if isinstance(fields, dict):
                yield subject.key("config_groups", name, key), fields, ARGUMENT_KEYS
    scheme = subject.quantization.kv_scheme
    if isinstance(scheme, dict):
        yield subject.key("kv_cache_scheme"), scheme, ARGUMENT_KEYS


def invalid_value(subject: Subject) -> Iterator[Finding]:
    """compressed-tensors: quant_args.py, the validators of QuantizationArgs."""
    for place, fields, _ in _argument_blocks(subject):
        for key, problem in _invalid(fields):
            where = f"{place}.{key}"
            yield error("invalid-value", PYDANTIC, where, problem[:200], "correct the value")


def _invalid(fields: dict[str, Any]) -> Iterator[tuple[str, str]]:
    bits, kind, strategy = fields.get("num_bits", 8), fields.get("type", "int"), strategy_of(fields)
    if whole_number(bits) is None:
        yield "num_bits", f"is {bits!r}, expected a number"
    if not isinstance(kind, str) or kind.lower() not in ("int", "float"):
        yield "type", f"is {kind!r}, expected 'int' or 'float'"
    if strategy not in STRATEGIES:
        given = fields.get("strategy")
        hint = nearest(given, STRATEGIES) if isinstance(given, str) else ""
        yield "strategy", f"is {given!r}, expected one of {', '.join(STRATEGIES)}{hint}"
        return
    yield from _contradictions(fields, str(strategy))


def _contradictions(fields: dict[str, Any], strategy: str) -> Iterator[tuple[str, str]]:
    dynamic, size = fields.get("dynamic", False), fields.get("group_size")
    is_grouped = strategy in ("group", "tensor_group")
    if dynamic not in (True, False, "local"):
        yield "dynamic", f"is {dynamic!r}, expected true, false or 'local'"
    elif strategy == "token" and not dynamic:
        yield "dynamic", "is false, and strategy 'token' is dynamic"
    elif dynamic and strategy not in ("token", "tensor", "tensor_group", "group"):
        yield "dynamic", f"is {dynamic!r}, and strategy {strategy!r} is static"
    elif dynamic == "local" and strategy != "tensor_group":
        yield "dynamic", f"is 'local', and strategy {strategy!r} takes true or false"
    if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
        yield "group_size", f"is {size!r}, expected a number or null"
    elif is_grouped and (size is None or size <= 0):
        yield "group_size", f"is {size!r}, and strategy {strategy!r} needs one above 0"
    elif size is not None and size > 0 and not is_grouped:
        yield "group_size", f"is {size}, and strategy {strategy!r} takes none"
    structure = fields.get("block_structure")
    if strategy == "block" and pair(structure) is None:
        yield "block_structure", f"is {structure!r}, and strategy 'block' needs [rows, columns]"
    if strategy != "block" and structure is not None:
        yield "block_structure", f"is {structure!r}, and strategy {strategy!r} takes none"


def groups_missing(subject: Subject) -> Iterator[Finding]:
    """Servers read config_groups only; TensorRT-LLM raises without one.

    TensorRT-LLM: quant_config_utils.py, update_quant_config_from_compressed_tensors.
    """
    quantization = subject.quantization
    if quantization.method == COMPRESSED_TENSORS and not quantization.groups:
        given = quantization.block.get("config_groups")
        problem = "is missing" if given is None else "has no group"
        place = subject.key("config_groups")
        yield error("no-groups", subject.loaders(), place, problem, "export the checkpoint again")


def group_without_weights(subject: Subject) -> Iterator[Finding]:
    """SGLang: compressed_tensors.py, _quantization_scheme_map_from_config parses null.

    vLLM: from_config drops groups with one target that ends in Attention, and parses others too.
    TensorRT-LLM: quant_config_utils.py, _quant_config_from_config_group indexes null.
    """
    for group in _groups(subject):
        if group.weights is None:
            is_attention = len(group.targets) == 1 and group.targets[0].endswith("Attention")
            engines = (SGLANG, TENSORRT) if is_attention else (VLLM, SGLANG, TENSORRT)
            place = subject.key("config_groups", group.name, "weights")
            problem = f"is null for targets {list(group.targets)[:3]}: the engine fails on it"
            advice = "remove the group; kv_cache_scheme says how keys and values are quantized"
            yield error("group-without-weights", engines, place, problem, advice)


def _groups(subject: Subject) -> tuple[Group, ...]:
    is_ours = subject.quantization.method == COMPRESSED_TENSORS
    return subject.quantization.groups if is_ours else ()


def not_fp8(subject: Subject) -> Iterator[Finding]:
    """Other widths and types have schemes of their own, for which quantkit has no rules."""
    for group in _groups(subject):
        if group.weights is not None and not group.is_fp8:
            bits, kind = group.weights.get("num_bits", 8), group.weights.get("type", "int")
            place = subject.key("config_groups", group.name, "weights")
            problem = f"describes {bits!r}-bit {kind!r}: quantkit checks 8-bit floats only"
            yield note("not-fp8", subject.loaders(), place, problem[:200])


def unsupported_scheme(subject: Subject) -> Iterator[Finding]:
    """Combinations of weights and inputs for which an engine has a kernel.

    vLLM: compressed_tensors.py, _is_fp8_w8a8 and _is_fp8_w8a16; SGLang: the same, its _is_fp8_w8a16
    without blocks. TensorRT-LLM: quant_config_utils.py, _quant_config_from_config_group.
    """
    for group in _groups(subject):
        if group.weights is None or not group.is_fp8:
            continue
        for engines, problem in _unsupported(group, group.weights):
            place = subject.key("config_groups", group.name)
            is_exportable = engines == (TENSORRT,)
            advice = "export it as --format modelopt" if is_exportable else "quantize it again"
            yield error("unsupported-scheme", engines, place, problem, advice)


def _unsupported(group: Group, weights: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    servers = (VLLM, SGLANG)
    if weights.get("symmetric", True) is not True or weights.get("dynamic", False) is not False:
        yield servers, "has weights that are not symmetric and static"
    elif group.strategy not in ("tensor", "channel", "block"):
        yield servers, f"has weights per {group.strategy}"
    elif group.inputs is None and group.strategy == "block":
        yield (SGLANG,), "has weights per block and inputs that are not quantized"
    elif group.static_inputs and not _is_plain_static(group):
        yield servers, "has static inputs that are not one symmetric scale per tensor"
    words = (group.strategy, None if group.inputs is None else strategy_of(group.inputs))
    if words == ("block", "group") and mapping(group.inputs).get("group_size") != 128:
        yield (TENSORRT,), "has input groups that are not of 128 features"
    elif words not in (("channel", "token"), ("block", "group")):
        inputs = (
            "inputs that are not quantized" if group.inputs is None else f"inputs per {words[1]}"
        )
        yield (TENSORRT,), f"has weights per {words[0]} and {inputs}"


def _is_plain_static(group: Group) -> bool:
    inputs = group.inputs or {}
    is_symmetric = inputs.get("symmetric", True) is True
    return is_symmetric and strategy_of(inputs) == "tensor" and group.strategy != "block"


def wrong_format(subject: Subject) -> Iterator[Finding]:
    """In vLLM and SGLang: utils.py, is_activation_quantization_format; a group's own format wins.

    compressed-tensors: config/base.py, CompressionFormat, for the format of a group.
    """
    top = subject.quantization.block.get("format")
    for group in _groups(subject):
        if not group.is_fp8:
            continue
        found = group.format if group.format is not None else top
        place = subject.key(*(("config_groups", group.name) if group.format else ()), "format")
        if found not in FP8_FORMATS:
            hint = nearest(found, FP8_FORMATS) if isinstance(found, str) else ""
            problem = f"is {found!r}, expected 'float-quantized' for 8-bit floats{hint}"
            is_word = group.format is None or group.format in FORMATS
            engines = (VLLM, SGLANG) if is_word else PYDANTIC
            yield error("format", engines, place, problem, "write 'float-quantized'")


def wrong_status(subject: Subject) -> Iterator[Finding]:
    """transformers: CompressedTensorsConfig.is_quantization_compressed.

    With another status weights are parameters in 16 bits, and codes are loaded as if values.
    """
    quantization = subject.quantization
    status = quantization.block.get("quantization_status")
    if quantization.method == COMPRESSED_TENSORS and status != "compressed":
        problem = f"is {status!r}, so transformers takes the stored codes for weights"
        place = subject.key("quantization_status")
        yield error("status", (TRANSFORMERS,), place, problem, "write 'compressed'")


def groups_for_tensorrt(subject: Subject) -> Iterator[Finding]:
    """TensorRT-LLM: quant_config_utils.py, _build_layer_quant_configs matches names only."""
    groups = _groups(subject)
    if len(groups) < 2:
        return
    for group in groups:
        if names_linears(group):
            place = subject.key("config_groups", group.name, "targets")
            problem = "is 'Linear', and with several groups the engine matches names only"
            yield error("class-target", (TENSORRT,), place, problem, "target names, or re:")


def target_unmatched(subject: Subject) -> Iterator[Finding]:
    """TensorRT-LLM raises (see above) with several groups; compressed-tensors warns."""
    modules = subject.linears.by_name
    for group in _groups(subject):
        for target in group.targets if group.weights is not None else ():
            if target == "Linear" or (not is_regex(target) and "." not in target):
                continue
            expression = compiled(target.removeprefix(PATTERN)) if is_regex(target) else None
            if expression is not None and any(map(expression.match, modules)):
                continue
            if not is_regex(target) and target in modules:
                continue
            place = subject.key("config_groups", group.name, "targets")
            what = "is no regular expression" if _is_broken(target) else "names no linear module"
            problem = f"has {target[:200]!r}, which {what}{nearest(target, list(modules)[:5000])}"
            yield error("target", subject.loaders(), place, problem, "correct or remove it")


def _is_broken(target: str) -> bool:
    return is_regex(target) and compiled(target.removeprefix(PATTERN)) is None


def sparsity(subject: Subject) -> Iterator[Finding]:
    """vLLM: compressed_tensors.py, _parse_sparsity_config raises where there are targets."""
    block = mapping(subject.quantization.block.get("sparsity_config"))
    if subject.quantization.method == COMPRESSED_TENSORS and strings(block.get("targets")):
        problem = "has targets, and vLLM has no sparse kernels any more"
        place = subject.key("sparsity_config")
        yield error("sparsity", (VLLM,), place, problem, "store dense weights")


RULES = (
    unknown_key,
    invalid_value,
    groups_missing,
    group_without_weights,
    not_fp8,
    unsupported_scheme,
    wrong_format,
    wrong_status,
    groups_for_tensorrt,
    target_unmatched,
    sparsity,
)
