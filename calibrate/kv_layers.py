"""Which decoder layers keep their keys and values as they are, of those that a recipe names.

Sliding-window layers have short caches, where 8 bits save little; a layer whose keys FP8 cannot
hold is better left out than served. The words are those of vLLM's --kv-cache-dtype-skip-layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.checkpoint import cached_layers
from quantkit.errors import RecipeError

SLIDING = "sliding_window"
"""The entry that means every layer with a sliding window."""
_SLIDING_KINDS = ("sliding_attention", "chunked_attention")
_NUMBERS = re.compile(r"(\d+)(?:-(\d+))?")


def check_entries(entries: Sequence[str]) -> None:
    """Raise RecipeError for an entry that is neither SLIDING nor a number or a range of them."""
    for entry in entries:
        if entry != SLIDING and _NUMBERS.fullmatch(entry) is None:
            raise RecipeError(
                f'kv_ignore has {entry!r}; it takes "{SLIDING}", the number of a layer, "3", or '
                'several, "3-5"'
            )


def ignored_layers(entries: Sequence[str], config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the numbers of the layers that `entries` select, of a model's config.json.

    Raises RecipeError for an entry that selects no layer with a KV cache, and where none is left.
    """
    layers, found = cached_layers(config), set[int]()
    for entry in entries:
        chosen = _selected(entry, config, layers)
        if not chosen:
            raise RecipeError(
                f"kv_ignore has {entry!r}, which is no layer of this model that caches keys and "
                f"values ({_shown(layers)})"
            )
        found |= chosen
    if layers and found == set(layers):
        raise RecipeError('kv_ignore leaves no layer to quantize the cache of; use kv = "none"')
    return tuple(sorted(found))


def _selected(entry: str, config: Mapping[str, Any], layers: Sequence[int]) -> set[int]:
    if entry == SLIDING:
        return _sliding(config) & set(layers)
    numbers = _NUMBERS.fullmatch(entry)
    if numbers is None:
        return set()
    first, last = int(numbers[1]), int(numbers[2] or numbers[1])
    return {layer for layer in layers if first <= layer <= last}


def _sliding(config: Mapping[str, Any]) -> set[int]:
    text = config.get("text_config") or config
    kinds = text.get("layer_types")
    if kinds is None:  # Mistral's config says it of all layers at once
        return set(cached_layers(config)) if text.get("sliding_window") else set()
    return {number for number, kind in enumerate(kinds) if kind in _SLIDING_KINDS}


def _shown(layers: Sequence[int]) -> str:
    return f"{layers[0]} to {layers[-1]}" if layers else "it has none"
