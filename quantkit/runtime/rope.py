"""Which rotary embeddings a transformers config asks for, and in which layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, UnsupportedError, first_line

MAX_HEAD_DIM = 65536
"""Far beyond any model."""
LONG = "longrope"
"""Other frequencies for sequences that outgrow the length the model was first trained with."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn", LONG)
"""Rotary embeddings whose frequencies are one set, or two of which the length chooses."""


def rotary_frequencies(config: Any) -> list[tuple[Tensor, float]]:
    """Return of each rotation, as `ModelShape.rotary` numbers them, its frequencies and factor.

    LongRoPE has two: for sequences of up to `long_from` tokens, and for longer ones. Shapes:
    float32 [rotary_dim / 2], radians per position of each pair; the factor is on cos and sin.
    """
    rotations = _rotations(config)
    try:
        limit = long_from(config)
        if limit is not None:
            return [_scaled(config, LONG, seq_len=length) for length in (limit, limit + 1)]
        return [_frequencies(config, kind, parameters) for kind, parameters in rotations.items()]
    except Exception as error:  # whatever a wrong type or size makes torch raise
        raise CheckpointError(
            f"config.json has rope_parameters {dict(rotations)!r:.200}, which give no rotary "
            f"embedding: {first_line(error)}"
        ) from error


def _frequencies(
    config: Any, layer_type: str | None, parameters: Mapping[str, Any]
) -> tuple[Tensor, float]:
    kind = parameters["rope_type"]
    if kind == "default":
        share = parameters.get("partial_rotary_factor", 1.0)
        rotary_dim = int(head_dim(config) * share)
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    options = {} if layer_type is None else {"layer_type": layer_type}
    return _scaled(config, kind, **options)


def _scaled(config: Any, kind: str, **options: Any) -> tuple[Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, **options)
    return frequencies, float(factor)


def long_from(config: Any) -> int | None:
    """Return the tokens beyond which LongRoPE turns a sequence otherwise; None without LongRoPE."""
    parameters = _rotations(config).get(None, {})
    if parameters.get("rope_type") != LONG:
        return None
    limit = parameters.get("original_max_position_embeddings")
    if not isinstance(limit, int) or limit < 1:
        raise CheckpointError(
            f"config.json has original_max_position_embeddings {limit!r}, and LongRoPE needs a "
            "positive number; restore it"
        )
    return limit


def _rotations(config: Any) -> dict[str | None, Mapping[str, Any]]:
    """Return the parameters of each rotation by the type of its layers; None is all of them."""
    parameters = config.rope_parameters
    if "rope_type" in parameters:
        return {None: parameters}
    return {kind: parameters[kind] for kind in dict.fromkeys(config.layer_types)}


def head_dim(config: Any) -> int:
    """Return the features of a head; raises CheckpointError for a size that no model has."""
    explicit = getattr(config, "head_dim", None)
    size = int(explicit or config.hidden_size // config.num_attention_heads)
    if not 1 <= size <= MAX_HEAD_DIM:
        raise CheckpointError(
            f"config.json makes heads of {size} features, expected 1 to {MAX_HEAD_DIM}; restore it"
        )
    return size


def check_rope(config: Any) -> None:
    """Raise UnsupportedError for a rotary embedding that the decoder does not have."""
    for layer_type, parameters in _rotations(config).items():
        kind = parameters.get("rope_type")
        if kind not in ROPE_TYPES:
            raise UnsupportedError(f"rope_type {kind!r} is not known")
        if kind == LONG and layer_type is not None:
            raise UnsupportedError(f"rope_type {kind!r} of some layers only is not known")


def rotary_layers(config: Any) -> tuple[int | None, ...]:
    """Return which rotation each layer has, None for none; numbered as `rotary_frequencies`."""
    places = list(_rotations(config))
    if places != [None]:
        return tuple(places.index(kind) for kind in config.layer_types)
    flags = getattr(config, "no_rope_layers", None)  # 1 where rotary is *used*
    if not flags:
        return (0,) * int(config.num_hidden_layers)
    return tuple(0 if flag else None for flag in flags)
