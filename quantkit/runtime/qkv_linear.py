"""The q, k and v of a layer, whose products may go straight into the cache.

There are two ways, with the same bits: the product, and then a kernel that rotates and appends; or
one kernel, for a few tokens on a GPU. Which is faster is measured: `quantkit bench --kernels` shows
both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from quantkit.qkv_ops import MOST_ROWS, fits
from quantkit.runtime.decoder_layer import DecoderLayer
from quantkit.runtime.kv_cache import CacheStep, PagedCache
from quantkit.runtime.layers import Fp8Linear

FUSED_ROWS: Final = 0
"""Up to how many rows one kernel does it all, at most MOST_ROWS; 0: never, as long as no GPU has
shown that it is faster."""


@dataclass(frozen=True, slots=True)
class AppendingLinear:
    """The linear layer of q, k and v that leaves keys and values in the cache; returns queries."""

    plain: Fp8Linear
    cache: PagedCache
    layer: int
    angles: tuple[Tensor, Tensor] | None
    step: CacheStep
    heads: int

    @classmethod
    def of(
        cls,
        layer: DecoderLayer,
        number: int,
        angles: tuple[Tensor, Tensor] | None,
        step: CacheStep,
        cache: PagedCache,
        heads: int,
    ) -> AppendingLinear | None:
        """Return the layer for one step; None where the two ways differ, or one is not wanted."""
        plain, layout = layer.qkv.decoding(step.num_tokens), cache.layout
        if plain is None or plain.outliers is not None or layout.saturation is not None:
            return None
        if layer.q_norm is not None or layer.k_norm is not None:
            return None
        groups, columns = plain.scale.shape[1], plain.codes.shape[1]
        rotary_dim = 0 if angles is None else angles[0].shape[1]
        sizes = (groups, plain.group_size, layout.head_dim, rotary_dim)
        if step.num_tokens > fused_rows(plain.codes.device) or not fits(columns, *sizes):
            return None
        return cls(plain, cache, number, angles, step, heads)

    def __call__(self, x: Tensor) -> Tensor:
        """Return queries. Shapes: [num_tokens, in_features] -> [num_tokens, heads, head_dim]."""
        plain = self.plain
        weights = (plain.codes, plain.scale, plain.bias, plain.group_size)
        return self.cache.append_product(self.layer, x, weights, self.angles, self.step, self.heads)

    def scaled(self, num_rows: int) -> None:
        """Return None: inputs stay as they are."""
        return None


def fused_rows(device: torch.device) -> int:
    """Return up to how many rows `device` does it all in one kernel."""
    return min(FUSED_ROWS, MOST_ROWS) if device.type == "cuda" else 0
