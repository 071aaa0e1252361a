"""The norms of a decoder: what they compute, alone and joined to what is next to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from quantkit.attention_ops import rms_norm
from quantkit.row_ops import (
    QuantizedRows,
    add_rms_norm,
    add_rms_norm_quantize,
    quantize_rows,
    rms_norm_quantize,
)


class Norm(Protocol):
    """Rows in, rows out. Shapes: [num_tokens, features] -> the same, wherever none are given."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalized rows."""
        ...

    def after_add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return `total = x + delta` and the normalized total."""
        ...

    def quantized(self, x: Tensor, scale: Tensor | None) -> QuantizedRows:
        """Return the normalized rows in 8 bits, see `quantize_rows`."""
        ...

    def quantized_after_add(
        self, x: Tensor, delta: Tensor, scale: Tensor | None
    ) -> tuple[Tensor, QuantizedRows]:
        """Return `total = x + delta`, and the normalized total in 8 bits."""
        ...

    def for_step(self) -> Tensor | None:
        """Return the weight for `decoder_step`; None for a norm that it does not know."""
        ...


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """`x / sqrt(mean(x^2) + eps) * weight`, see `rms_norm`. Shape of weight: [features]."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalized rows."""
        return rms_norm(x, self.weight, self.eps)

    def after_add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return `total = x + delta` and the normalized total."""
        return add_rms_norm(x, delta, self.weight, self.eps)

    def quantized(self, x: Tensor, scale: Tensor | None) -> QuantizedRows:
        """Return the normalized rows in 8 bits."""
        return rms_norm_quantize(x, self.weight, self.eps, scale)

    def quantized_after_add(
        self, x: Tensor, delta: Tensor, scale: Tensor | None
    ) -> tuple[Tensor, QuantizedRows]:
        """Return `total = x + delta`, and the normalized total in 8 bits."""
        return add_rms_norm_quantize(x, delta, self.weight, self.eps, scale)

    def for_step(self) -> Tensor:
        """Return the weight for `decoder_step`."""
        return self.weight


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, float32 inside, rounded once.

    Shapes of weight and bias: [features].
    """

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalized rows."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def after_add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return `total = x + delta` and the normalized total."""
        total = x + delta
        return total, self(total)

    def quantized(self, x: Tensor, scale: Tensor | None) -> QuantizedRows:
        """Return the normalized rows in 8 bits."""
        return quantize_rows(self(x), scale)

    def quantized_after_add(
        self, x: Tensor, delta: Tensor, scale: Tensor | None
    ) -> tuple[Tensor, QuantizedRows]:
        """Return `total = x + delta`, and the normalized total in 8 bits."""
        total, normed = self.after_add(x, delta)
        return total, quantize_rows(normed, scale)

    def for_step(self) -> None:
        """Return None: `decoder_step` has RMS norms only."""
        return None
