"""What an export is to hold: the Scheme that a format can say, nearest to the checkpoint's.

Knows schemes, not files. The first choice is always the one that leaves codes as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quantkit.errors import UnsupportedError, nearest
from quantkit.numerics import E4M3
from quantkit.scheme import Granularity, QuantSpec, Scheme

COMPRESSED_TENSORS, FP8_BLOCK, MODELOPT = "compressed-tensors", "fp8-block", "modelopt"
FORMATS = (COMPRESSED_TENSORS, FP8_BLOCK, MODELOPT)
"""What `--format` may be; the first is the default."""
ENGINES_OF = {
    COMPRESSED_TENSORS: ("vllm", "sglang", "transformers", "tensorrt-llm"),
    FP8_BLOCK: ("vllm", "sglang", "transformers"),
    MODELOPT: ("vllm", "sglang", "tensorrt-llm"),
}
"""Engines that a format is meant for; a scheme may rule out one of them."""

BLOCK = (128, 128)
_PER_TOKEN = QuantSpec(Granularity.TOKEN, dynamic=True)
_PER_GROUP = QuantSpec(Granularity.GROUP, dynamic=True, group_size=BLOCK[1])


def target_scheme(source: Scheme, format_name: str, plain: Sequence[str] = ()) -> Scheme:
    """Return the scheme of an export in the named format.

    compressed-tensors keeps a portable scheme; a native one becomes E4M3 per channel with inputs
    per token. fp8-block is E4M3 in blocks of 128 x 128, modelopt is E4M3 per tensor with static
    inputs. The KV cache keeps its scheme, in E4M3; the modules in `plain` are quantized no longer.
    Raises UnsupportedError for an unknown format, and for KV scales that the format cannot hold.
    """
    if format_name not in FORMATS:
        hint = nearest(format_name, FORMATS)
        raise UnsupportedError(
            f"--format {format_name!r} is not known{hint}; use {', '.join(FORMATS)}"
        )
    if format_name == COMPRESSED_TENSORS and not source.native:
        return source
    weights, inputs = {
        COMPRESSED_TENSORS: (QuantSpec(Granularity.CHANNEL), _PER_TOKEN),
        FP8_BLOCK: (QuantSpec(Granularity.BLOCK, block_shape=BLOCK), _PER_GROUP),
        MODELOPT: (QuantSpec(Granularity.TENSOR), QuantSpec(Granularity.TENSOR)),
    }[format_name]
    if format_name != COMPRESSED_TENSORS and _is_per_head(source.kv):
        raise UnsupportedError(
            f"{format_name} has one KV scale a layer and the checkpoint has one per head; use "
            "--format compressed-tensors, or calibrate with --kv fp8"
        )
    if source.kv_ignore:
        layers = ", ".join(map(str, source.kv_ignore))
        raise UnsupportedError(
            f"{format_name} has one kind of KV cache in all layers, and the checkpoint leaves that "
            f"of layers {layers} in 16 bits; calibrate without kv_ignore, or with --kv none"
        )
    ignore = (*source.ignore, *plain)
    kv = None if source.kv is None else replace(source.kv, format=E4M3.name)
    return Scheme(weights, inputs, kv, ignore)


def engines_of(format_name: str, scheme: Scheme) -> tuple[str, ...]:
    """Return the engines that are expected to load an export of this scheme."""
    engines = ENGINES_OF[format_name]
    if format_name == COMPRESSED_TENSORS and scheme.weights.granularity is Granularity.TENSOR:
        return tuple(engine for engine in engines if engine != "tensorrt-llm")
    if _is_per_head(scheme.kv):
        return ("vllm",)
    return engines


def keeps_codes(source: QuantSpec, target: QuantSpec) -> bool:
    """Tell whether a weight keeps its codes: each new tile lies within one of the old ones."""
    if source.format != E4M3.name or target.format != E4M3.name:
        return False
    return source == target or source.granularity is Granularity.TENSOR


def _is_per_head(kv: QuantSpec | None) -> bool:
    return kv is not None and kv.granularity is Granularity.HEAD
