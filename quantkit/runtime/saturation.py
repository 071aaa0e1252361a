"""How many values a static scale cannot hold, counted while a model runs.

Off unless an engine is loaded with a `Saturation` to count in: it costs a pass over every input.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SaturationCount:
    """How many of `values` numbers were beyond the largest code, and became it."""

    values: int
    saturated: int

    @property
    def share(self) -> float:
        """The part that saturated; 0 of nothing."""
        return self.saturated / self.values if self.values else 0.0


@dataclass(slots=True)
class Saturation:
    """Counts by name: modules whose input is rounded, and "keys" or "values" of a layer."""

    _values: dict[str, int] = field(default_factory=dict)
    _saturated: dict[str, Tensor] = field(default_factory=dict)

    def count(self, name: str, x: Tensor, limit: Tensor) -> None:
        """Take in numbers that are about to be rounded. Shapes: x any, limit as broadcasts."""
        found = (x.abs() > limit).sum()
        # Kept on the device: nothing waits for the number.
        self._values[name] = self._values.get(name, 0) + x.numel()
        self._saturated[name] = self._saturated.get(name, torch.zeros_like(found)) + found

    def counts(self) -> dict[str, SaturationCount]:
        """Return what was counted, by name, in the order of the model."""
        return {
            name: SaturationCount(values, int(self._saturated[name].item()))
            for name, values in self._values.items()
        }


def keys_of(layer: int) -> str:
    """Return the name under which the keys of a layer are counted."""
    return f"keys of layer {layer}"


def values_of(layer: int) -> str:
    """Return the name under which the values of a layer are counted."""
    return f"values of layer {layer}"
