"""Numbers of a config.json that nothing may trust: checked before anything is built from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError

MAX_LAYERS = 10_000
"""Far beyond any model; lists of a config have an element a layer."""
MAX_SIZE = 2**31
MAX_HEAD_DIM = 2**16
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


def check_sizes(config: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError, naming `path`, for sizes that no model has.

    A size may be absent or null, and some families list one of each layer; a number of layers is
    one number.
    """
    text = config.get("text_config")
    if text is not None and not isinstance(text, Mapping):
        raise _wrong(path, "text_config", text, "a JSON object")
    for level in (config, text or {}):
        for key in LAYERS:
            if level.get(key) is not None and not _is_within(level[key], MAX_LAYERS):
                raise _wrong(path, key, level[key], f"a number of layers up to {MAX_LAYERS}")
        for key in SIZES:
            is_number = isinstance(level.get(key), int | float)
            limit = MAX_HEAD_DIM if key == "head_dim" else MAX_SIZE
            if is_number and not _is_within(level[key], limit):
                raise _wrong(path, key, level[key], f"a whole number from 1 to {limit}")
        _check_layer_types(level, path)


def _check_layer_types(level: Mapping[str, Any], path: Path) -> None:
    kinds, shared = level.get("layer_types"), level.get("num_kv_shared_layers")
    is_list = isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
    if kinds is not None and not is_list:
        raise _wrong(path, "layer_types", kinds, "a list of names")
    if shared is not None and not (shared == 0 or _is_within(shared, MAX_LAYERS)):
        raise _wrong(path, "num_kv_shared_layers", shared, "a number of layers")


def _is_within(value: object, limit: int) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return is_number and 1 <= value <= limit  # type: ignore[operator]


def _wrong(path: Path, key: str, value: object, expected: str) -> CheckpointError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
    return CheckpointError(f"{path} has {key}={shown}, expected {expected}; restore the file")
