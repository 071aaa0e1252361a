"""Weights in another 8-bit layout: the same codes where they can stay, new ones where they cannot.

Owns the arithmetic and its loss. Knows tensors and specs, no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log10

import torch
from torch import Tensor

from quantkit.calibrate.scale_search import search_scale
from quantkit.export.target import keeps_codes
from quantkit.numerics import dequantize, quantize
from quantkit.quantized_weight import QuantizedWeight
from quantkit.scheme import Granularity, QuantSpec


@dataclass(frozen=True, slots=True)
class Loss:
    """What rounding again cost: sums of squares over weights, of the values and of the change."""

    signal: float = 0.0
    error: float = 0.0
    num_modules: int = 0

    def __add__(self, other: Loss) -> Loss:
        """Sum up."""
        return Loss(
            self.signal + other.signal,
            self.error + other.error,
            self.num_modules + other.num_modules,
        )

    @property
    def sqnr_db(self) -> float:
        """10 log10(signal / error); infinite if nothing changed."""
        if self.error == 0.0:
            return inf
        return 10 * log10(self.signal / self.error) if self.signal else -inf


@dataclass(frozen=True, slots=True)
class Converted:
    """One weight [N, K] in the target's layout: codes [N, K], scale as `spec.scale_shape`."""

    codes: Tensor
    scale: Tensor
    loss: Loss


def convert_group(
    weights: Sequence[QuantizedWeight], spec: QuantSpec, importance: Tensor | None = None
) -> list[Converted]:
    """Bring weights that read one input into the layout of `spec`.

    One scale per tensor is shared by all of them, as engines that fuse them want it. New scales are
    searched for the least squared change of the weights, weighted by `importance` of the input
    channels where it is given: E[x^2], float32 [K].
    """
    together = spec.granularity is Granularity.TENSOR
    kept = all(keeps_codes(weight.spec, spec) and weight.columns is None for weight in weights)
    if kept and (_same_scale(weights) or not together):
        return [Converted(weight.codes, _widen(weight, spec), Loss()) for weight in weights]
    if together:
        return _round_together(weights, spec, importance)
    return [found for weight in weights for found in _round_together([weight], spec, importance)]


def _same_scale(weights: Sequence[QuantizedWeight]) -> bool:
    return all(torch.equal(weight.scale, weights[0].scale) for weight in weights)


def _widen(weight: QuantizedWeight, spec: QuantSpec) -> Tensor:
    """Return the scale of each new tile: that of the old tile around it."""
    shape = spec.scale_shape(*weight.codes.shape)
    if tuple(weight.scale.shape) == shape:
        return weight.scale
    return weight.scale.reshape(1).expand(shape).contiguous()


def _round_together(
    weights: Sequence[QuantizedWeight], spec: QuantSpec, importance: Tensor | None
) -> list[Converted]:
    """Round weights anew, stacked by rows: several only where one scale serves them all."""
    values = torch.cat([weight.dequantize() for weight in weights])
    tile = spec.tile(*values.shape)
    grid = search_scale(values, importance, spec.fmt, tile).scale
    codes = quantize(values, grid, spec.fmt, tile)
    change = dequantize(codes, grid, spec.fmt, tile).sub_(values)
    counts = [weight.codes.shape[0] for weight in weights]
    stored = grid.reshape(spec.scale_shape(*values.shape))
    bits = torch.split(codes.view(torch.uint8), counts)
    parts = zip(bits, torch.split(values, counts), torch.split(change, counts), strict=True)
    return [
        Converted(part.view(codes.dtype), stored, _loss(value, error))
        for part, value, error in parts
    ]


def _loss(values: Tensor, change: Tensor) -> Loss:
    error = _power(change)
    return Loss(_power(values), error, 1) if error else Loss()


def _power(x: Tensor) -> float:
    return float(x.double().square().sum())
