"""The container of compressed-tensors, `float-quantized`: what llm-compressor writes.

Its readers reject unknown keys inside a group, so nothing of ours is ever added there. Source:
compressed_tensors/quantization/quant_config.py, quant_scheme.py, quant_args.py (0.15 to 0.20).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.containers.container import Container, check_readable, mapping, names_list
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.scheme import QuantSpec, Scheme

FORMATS = ("float-quantized", "naive-quantized", "dense")
"""Formats in which FP8 codes stand as they are; naive-quantized is an old word for the same."""
MIXED = "mixed-precision"
"""The format of a checkpoint whose groups have formats of their own."""


class CompressedTensors(Container):
    """`quant_method: compressed-tensors`."""

    name = "compressed-tensors"
    method = "compressed-tensors"

    def to_config(self, scheme: Scheme) -> dict[str, Any]:
        """Return the block with the keys of version 0.17, which all engines read."""
        if scheme.native:
            raise UnsupportedError(
                "compressed-tensors holds E4M3 weights only; a native scheme has other formats and "
                "channels beside the codes"
            )
        group = {
            "targets": ["Linear"],
            "format": "float-quantized",
            "weights": scheme.weights.to_config(),
            "input_activations": scheme.inputs.to_config() if scheme.inputs else None,
            "output_activations": None,
        }
        return {
            "quant_method": self.method,
            "format": "float-quantized",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "ignore": list(scheme.ignore),
            "kv_cache_scheme": scheme.kv.to_config() if scheme.kv else None,
            "config_groups": {"group_0": group},
            "sparsity_config": {},
            "transform_config": {},
            "version": "0.17.0",
        }

    def from_config(self, block: Mapping[str, Any]) -> Scheme:
        """Return the scheme; groups must agree, whatever modules they target."""
        _check_plain(block)
        groups = _weight_groups(block)
        weights, inputs = _one_scheme(groups)
        kv = block.get("kv_cache_scheme")
        return check_readable(
            Scheme(
                weights=weights,
                inputs=inputs,
                kv=QuantSpec.from_config(mapping(kv, "kv_cache_scheme")) if kv else None,
                ignore=names_list(block, "ignore"),
            )
        )


def _check_plain(block: Mapping[str, Any]) -> None:
    """Raise CheckpointError if weights are more than FP8 codes with scales."""
    if block.get("format") not in (*FORMATS, MIXED):
        raise CheckpointError(
            f"quantization_config has format={block.get('format')!r}; of compressed-tensors, "
            f"quantkit reads {', '.join(FORMATS)}"
        )
    sparse = mapping(block.get("sparsity_config") or {}, "sparsity_config").get("format", "dense")
    if sparse != "dense":
        raise CheckpointError(
            f"quantization_config has sparsity_config with format {sparse!r}; quantkit reads dense "
            "weights only"
        )
    if mapping(block.get("transform_config") or {}, "transform_config").get("config_groups"):
        raise CheckpointError(
            "quantization_config has a transform_config: inputs are rotated before they are "
            "multiplied, which quantkit does not do"
        )


def _weight_groups(block: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the groups with weights; one for attention alone quantizes nothing that is stored."""
    groups = mapping(block.get("config_groups") or {}, "config_groups")
    found = {}
    for name, value in groups.items():
        group = mapping(value, f"config_groups.{name}")
        targets = names_list(group, "targets")
        is_attention = bool(targets) and all(target.endswith("Attention") for target in targets)
        if group.get("weights"):
            found[name] = group
        elif not is_attention and len(groups) > 1:
            raise CheckpointError(
                f"quantization_config has config group {name!r} without weights for {targets}; "
                "quantkit reads groups that quantize weights"
            )
    if not found:
        raise CheckpointError(
            "quantization_config has 0 config groups with weights; quantkit needs one"
        )
    return found


def _one_scheme(groups: Mapping[str, Mapping[str, Any]]) -> tuple[QuantSpec, QuantSpec | None]:
    specs = {name: _specs(name, group) for name, group in groups.items()}
    first, *others = specs
    for name in others:
        if specs[name] != specs[first]:
            raise CheckpointError(
                f"quantization_config quantizes config groups {first!r} and {name!r} differently; "
                "quantkit reads one scheme for all modules"
            )
    return specs[first]


def _specs(name: str, group: Mapping[str, Any]) -> tuple[QuantSpec, QuantSpec | None]:
    if group.get("format") not in (None, *FORMATS):
        raise CheckpointError(
            f"quantization_config has config group {name!r} with format={group['format']!r}; "
            f"quantkit reads {', '.join(FORMATS)}"
        )
    inputs = group.get("input_activations")
    return (
        QuantSpec.from_config(mapping(group["weights"], f"{name}.weights")),
        QuantSpec.from_config(mapping(inputs, f"{name}.input_activations")) if inputs else None,
    )
