"""What a checkpoint's configuration says of its quantization, in one form for all containers."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import Any

from quantkit.lint.documents import mapping, strings, whole_number
from quantkit.lint.engines import COMPRESSED_TENSORS, FBGEMM, FP8, MODELOPT
from quantkit.lint.folder import QUANT_CONFIG_NAME, Folder
from quantkit.lint.matching import IgnoreList, exact_or_pattern

CONFIG_KEY = "quantization_config"
LINEAR_CLASS = "Linear"
OTHER_PARTS = ("visual", "vision", "audio", "multi_modal_projector", "encoder.")
"""In the names of what is not the language model of a multimodal model."""
MODELOPT_STRATEGIES = {
    "FP8": "tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "channel",
    "FP8_PB_WO": "block",
    "FP8_BLOCK_SCALES": "block",
}


@dataclass(frozen=True, slots=True)
class Group:
    """How some linears are quantized.

    strategy: of the weights: tensor, channel, block, or another word of the container, or None.
    block: rows and columns of a block. static_inputs: whether each has one stored input scale.
    is_fp8: 8-bit floats. `weights` and `inputs` are compressed-tensors' own words, if it is that.
    """

    name: str
    targets: tuple[str, ...]
    strategy: str | None
    is_fp8: bool
    static_inputs: bool
    block: tuple[int, int] | None = None
    weights: dict[str, Any] | None = None
    inputs: dict[str, Any] | None = None
    format: str | None = None

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...] | None:
        """Return the shape of a weight's scale, or None for a strategy without a rule."""
        match self.strategy, self.block:
            case "tensor", _:
                return (1,)
            case "channel", _:
                return (rows, 1)
            case "block", (high, wide):
                return (ceil(rows / high), ceil(columns / wide))
        return None


@dataclass(slots=True)
class Quantization:
    """The method, its groups, its ignore list and its KV cache, as a checkpoint declares them.

    `place` and `ignore_key` are where the block and its ignore list are, for messages.
    `scale_name` is the name under which engines look for a weight's scale.
    """

    method: str
    block: dict[str, Any]
    place: str
    groups: tuple[Group, ...] = ()
    ignore: tuple[str, ...] = ()
    ignore_key: str = "ignore"
    kv_scheme: Any = None
    scale_name: str = "weight_scale"
    _lists: dict[str, IgnoreList] = field(default_factory=dict)

    def ignoring(self, engine: str, module: str) -> list[str]:
        """Return the entries of the ignore list by which an engine leaves a module alone."""
        if engine not in self._lists:
            self._lists[engine] = IgnoreList(self.method, engine, self.ignore)
        return self._lists[engine].matching(module)

    def may_ignore(self, engine: str, module: str) -> bool:
        """Whether an engine leaves a module alone, under any name that it may have there.

        Servers and newer transformers call the parts of a multimodal model by other names than its
        tensors have, and translate plain entries, not patterns.
        """
        return any(self.ignoring(engine, name) for name in _aliases(module))

    def group_by_name(self, module: str) -> Group | None:
        """Return the group that has a target for this very name, not for its class."""
        for group in self.groups:
            if any(exact_or_pattern(target, module) for target in group.targets):
                return group
        return None

    def group_of(self, module: str) -> Group | None:
        """Return the group of a linear: by its name, else by its class."""
        found = self.group_by_name(module)
        if found is not None:
            return found
        return next((g for g in self.groups if names_linears(g)), None)


def _aliases(module: str) -> tuple[str, ...]:
    inner = module.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
    if "language_model." in module:
        return (module, f"model.{inner}", f"language_model.model.{inner}", inner)
    is_other_part = any(part in module for part in OTHER_PARTS)
    return (module, inner, f"model.{inner}") if is_other_part else (module,)


def is_text(name: str) -> bool:
    """Whether a module or tensor belongs to the language model itself."""
    return not any(part in name for part in (*OTHER_PARTS, "mtp."))


def names_linears(group: Group) -> bool:
    """Whether a group means every linear module by its class."""
    return LINEAR_CLASS in group.targets


def read_quantization(folder: Folder) -> Quantization:
    """Return what config.json says, else hf_quant_config.json, else a method of ""."""
    text_block = folder.text_config.get(CONFIG_KEY)
    for found in (folder.config.get(CONFIG_KEY), text_block):
        if isinstance(found, dict):
            return _parse(found, CONFIG_KEY)
    legacy = folder.documents.get(QUANT_CONFIG_NAME)
    if legacy is not None and isinstance(legacy.get("quantization"), dict):
        return _parse({"quant_method": MODELOPT, **legacy}, QUANT_CONFIG_NAME)
    return Quantization("", {}, CONFIG_KEY)


def _parse(block: dict[str, Any], place: str) -> Quantization:
    method = block.get("quant_method")
    match method:
        case "compressed-tensors":
            return _parse_compressed_tensors(block, place)
        case "fp8":
            return _parse_fp8(block, place)
        case "modelopt" | "modelopt_fp8":
            return _parse_modelopt(block, place)
        case "fbgemm_fp8":
            group = Group("fbgemm_fp8", (LINEAR_CLASS,), "channel", True, False)
            return Quantization(FBGEMM, block, place, groups=(group,))
    return Quantization(method if isinstance(method, str) else "", block, place)


def _parse_compressed_tensors(block: dict[str, Any], place: str) -> Quantization:
    groups = mapping(block.get("config_groups"))
    return Quantization(
        COMPRESSED_TENSORS,
        block,
        place,
        groups=tuple(_group(name, value) for name, value in groups.items() if mapping(value)),
        ignore=tuple(strings(block.get("ignore"))),
        kv_scheme=block.get("kv_cache_scheme"),
    )


def _group(name: str, value: dict[str, Any]) -> Group:
    weights, inputs = value.get("weights"), value.get("input_activations")
    fields, input_fields = mapping(weights), mapping(inputs)
    return Group(
        name,
        tuple(strings(value.get("targets"))),
        strategy_of(fields) if isinstance(weights, dict) else None,
        is_fp8=(fields.get("num_bits", 8), fields.get("type")) == (8, "float"),
        static_inputs=bool(input_fields) and input_fields.get("dynamic") in (False, None),
        block=pair(fields.get("block_structure")),
        weights=fields if isinstance(weights, dict) else None,
        inputs=input_fields if isinstance(inputs, dict) else None,
        format=value.get("format") if isinstance(value.get("format"), str) else None,
    )


def strategy_of(fields: dict[str, Any]) -> str | None:
    """Return the strategy, inferred as compressed-tensors infers one (quant_args.py)."""
    strategy, size = fields.get("strategy"), fields.get("group_size")
    if isinstance(strategy, str):
        return strategy.lower()
    if strategy is not None:
        return None
    if size is None:
        return "tensor"
    return "channel" if size == -1 else "group"


def pair(value: Any) -> tuple[int, int] | None:
    """Return two whole numbers above 0, or None."""
    if isinstance(value, str):
        value = [int(part) if part.isdecimal() else None for part in value[:40].split("x")]
    if not isinstance(value, list) or len(value) != 2:
        return None
    rows, columns = map(whole_number, value)
    return (rows, columns) if rows and columns else None


def _parse_fp8(block: dict[str, Any], place: str) -> Quantization:
    shape = pair(block.get("weight_block_size"))
    is_block = block.get("weight_block_size") is not None
    keys = ("ignored_layers", "modules_to_not_convert")
    key = next((key for key in keys if strings(block.get(key))), keys[1])
    return Quantization(
        FP8,
        block,
        place,
        groups=(
            Group(
                "fp8",
                (LINEAR_CLASS,),
                "block" if is_block else "tensor",
                is_fp8=True,
                static_inputs=block.get("activation_scheme") == "static",
                block=shape,
            ),
        ),
        ignore=tuple(strings(block.get(key))),
        ignore_key=key,
        kv_scheme=block.get("kv_cache_scheme"),
        scale_name="weight_scale_inv" if is_block else "weight_scale",
    )


def _parse_modelopt(block: dict[str, Any], place: str) -> Quantization:
    nested = mapping(block.get("quantization"))
    fields = nested or block
    algorithm = algorithm_of(fields)
    key = "exclude_modules" if nested else "ignore"
    strategy = MODELOPT_STRATEGIES.get(algorithm)
    return Quantization(
        MODELOPT,
        block,
        place,
        groups=(
            Group(
                "modelopt",
                (LINEAR_CLASS,),
                strategy,
                is_fp8=strategy is not None,
                static_inputs=strategy == "tensor",
                block=(128, 128) if strategy == "block" else None,
            ),
        ),
        ignore=tuple(strings(fields.get(key))),
        ignore_key=key,
        kv_scheme=fields.get("kv_cache_quant_algo" if nested else "kv_cache_scheme"),
    )


def algorithm_of(fields: dict[str, Any]) -> str:
    """Return modelopt's quant_algo in capitals."""
    value = fields.get("quant_algo")
    return value.upper() if isinstance(value, str) else ""
