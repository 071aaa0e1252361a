"""How often each magnitude occurs among numbers that are, or are rounded to, bfloat16.

bfloat16 has 32,640 finite magnitudes, so that counts of each say all that there is to know of the
distribution, exactly, whatever passes by and in whatever range.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FINITE = 0x7F80
"""Bits of infinity: the magnitudes below it, as integers, are the finite ones in order."""


class Magnitudes:
    """Counts of |x|, or sums of weights where numbers do not count alike."""

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(_FINITE, dtype=torch.float64, device=device)
        self._new = torch.zeros_like(self.counts)

    def add(self, x: Tensor, weights: Tensor | None = None) -> None:
        """Count numbers. Shapes: x any, weights as x. Infinities and NaN are passed over.

        They are part of `counts` once they are taken and merged, or asked for.
        """
        bits = (x.bfloat16().view(torch.int16).flatten() & 0x7FFF).int()
        weights = None if weights is None else weights.double().flatten()
        found = torch.bincount(bits, weights, minlength=_FINITE)
        self._new += found[:_FINITE]

    def take(self) -> Tensor:
        """Return what was added since the last time."""
        found, self._new = self._new, torch.zeros_like(self._new)
        return found

    def merge(self, counts: Tensor) -> None:
        """Add what `take` returned, here or in another process."""
        self.counts += counts

    @property
    def values(self) -> Tensor:
        """The magnitudes that `counts` is about, ascending. Shapes: float32 [32640]."""
        bits = torch.arange(_FINITE, device=self.counts.device)
        return bits.to(torch.int16).view(torch.bfloat16).float()

    def occurring(self) -> tuple[Tensor, Tensor]:
        """Return the magnitudes that occurred, float32 [n] ascending, and their counts [n]."""
        self.merge(self.take())
        found = self.counts > 0
        return self.values[found], self.counts[found]
