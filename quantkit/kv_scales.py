"""Which tensors of a checkpoint scale the keys and values of which layer: names, no numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.containers import Names
from quantkit.errors import CheckpointError

_LAYER = re.compile(r"\.(\d+)\.")
_ATTENTION = re.compile(r"(.*\.(\d+)\.\w*(?:attn|attention))\.")


@dataclass(frozen=True, slots=True)
class LayerScales:
    """The scales of one decoder layer, and the attention module that they belong to.

    `key` and `value` are names of tensors; None where the format says that the scale is 1.
    """

    attention: str
    key: str | None
    value: str | None


def find_kv_scales(
    names: Iterable[str], aliases: Names, layers: Iterable[int]
) -> dict[int, LayerScales]:
    """Return the layers with KV scales among the tensors `names`, which have all of `layers`.

    Raises CheckpointError if a layer of `layers` has none, or any layer has one of the two.
    """
    present = set(names)
    found: dict[int, LayerScales] = {}
    for base in _owners(present, aliases):
        number = _LAYER.search(base)
        if number is not None:
            found[int(number.group(1))] = LayerScales(
                base,
                _name(present, base, aliases.k_scale),
                _name(present, base, aliases.v_scale),
            )
    for layer in layers:
        if layer not in found:
            raise CheckpointError(f"no k_scale and v_scale for layer {layer}")
    return found


def unit_kv_scales(names: Iterable[str], layers: Iterable[int]) -> dict[int, LayerScales]:
    """Return scales of 1 for all of `layers`, with the attention modules found in `names`."""
    modules: dict[int, str] = {}
    for name in names:
        match = _ATTENTION.match(name)
        if match is not None:
            modules.setdefault(int(match.group(2)), match.group(1))
    return {layer: LayerScales(modules.get(layer, ""), None, None) for layer in layers}


def has_kv_scales(names: Iterable[str], aliases: Names) -> bool:
    """Tell whether any tensor is a scale of keys or values."""
    return bool(_owners(set(names), aliases))


def _owners(names: set[str], aliases: Names) -> list[str]:
    """Return the modules with scales below them."""
    bases = {
        name.removesuffix(f".{alias}")
        for alias in {*aliases.k_scale, *aliases.v_scale}
        for name in names
        if name.endswith(f".{alias}")
    }
    # "layers.0.self_attn.k_proj" also ends an alias; only what precedes k_proj is a base.
    return sorted(base for base in bases if not base.endswith(("k_proj", "v_proj")))


def _name(names: set[str], base: str, aliases: tuple[str, ...]) -> str:
    for alias in aliases:
        if f"{base}.{alias}" in names:
            return f"{base}.{alias}"
    raise CheckpointError(f"no {base}.{aliases[0]}")
