"""Caches of models that transformers runs: plain values, one cache a sequence.

An 8-bit cache is emulated by rounding what goes in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from quantkit.errors import CheckpointError, GenerationError, UnsupportedError
from quantkit.numerics import E4M3, Format, decode, encode
from quantkit.runtime.kv_cache import Scales
from quantkit.runtime.saturation import Saturation, keys_of, values_of


class RoundingCache(DynamicCache):  # type: ignore[misc]
    """A transformers cache that keeps every token, and rounds what it stores to 8 bits.

    `scales` maps the number of a layer to its k_scale and v_scale; other layers are not rounded.
    What the scales cannot hold is counted in `saturation`.
    """

    def __init__(
        self,
        config: Any,
        scales: dict[int, Scales],
        fmt: Format = E4M3,
        saturation: Saturation | None = None,
    ) -> None:
        super().__init__(config=config)
        self.scales = scales
        self.fmt = fmt
        self.saturation = saturation
        # A sliding layer drops old tokens and could not be rolled back. The mask hides them too.
        self.layers: list[Any] = [
            DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer
            for layer in self.layers
        ]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to a layer. Shapes: [1, num_kv_heads, num_tokens, head_dim]."""
        if layer_idx in self.scales:
            k_scale, v_scale = self.scales[layer_idx]
            if self.saturation is not None:
                for name, states, scale in (
                    (keys_of(layer_idx), key_states, k_scale),
                    (values_of(layer_idx), value_states, v_scale),
                ):
                    self.saturation.count(name, states, (scale * self.fmt.max).view(-1, 1, 1))
            key_states, value_states = (
                _rounded(key_states, k_scale, self.fmt),
                _rounded(value_states, v_scale, self.fmt),
            )
        stored: tuple[Tensor, Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return stored

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of every layer."""
        for number, layer in enumerate(self.layers):
            if type(layer) is not DynamicLayer:
                raise UnsupportedError(
                    f"layer {number} keeps a state ({type(layer).__name__}) that cannot be rolled "
                    "back; generate without a draft"
                )
            if layer.is_initialized:
                layer.keys = layer.keys[..., :length, :]
                layer.values = layer.values[..., :length, :]


class SequentialCache:
    """One transformers cache per sequence; implements SequenceCache."""

    def __init__(self, num_sequences: int, new: Callable[[], RoundingCache]) -> None:
        self._new = new
        self._lengths = [0] * num_sequences
        self._caches = [new() for _ in range(num_sequences)]

    @property
    def lengths(self) -> list[int]:
        """Tokens stored per sequence."""
        return list(self._lengths)

    def __getitem__(self, sequence: int) -> RoundingCache:
        return self._caches[sequence]

    def advance(self, sequence: int, num_tokens: int) -> None:
        """Count tokens that the model has stored."""
        self._lengths[sequence] += num_tokens

    def truncate(self, sequence: int, length: int) -> None:
        """Forget every token of `sequence` from position `length` on."""
        stored = self._lengths[sequence]
        if not 0 <= length <= stored:
            raise GenerationError(
                f"sequence {sequence} holds {stored} tokens and cannot be truncated to {length}"
            )
        if length == 0:
            self.release(sequence)
        elif length < stored:
            self._caches[sequence].truncate(length)
            self._lengths[sequence] = length

    def release(self, sequence: int) -> None:
        """Forget `sequence`; it may be used again."""
        self._caches[sequence] = self._new()
        self._lengths[sequence] = 0


def _rounded(x: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """Quantize and dequantize. Shapes: x [1, heads, tokens, head_dim], scale [1] or [heads]."""
    if scale.numel() not in (1, x.shape[1]):
        raise CheckpointError(
            f"a KV scale has {scale.numel()} elements, expected 1 or {x.shape[1]} (KV heads)"
        )
    per_head = scale.to(x.device).view(-1, 1, 1)
    return (decode(encode(x.float() / per_head, fmt), fmt) * per_head).to(x.dtype)
