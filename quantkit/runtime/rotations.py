"""All rotary embeddings of a model, on every device that holds a part of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.runtime.rotation import Rotation, by_length

Angles = tuple[Tensor, Tensor]
"""cos and sin [num_tokens, rotary_dim]."""


class Rotations:
    """Computes angles on the first of `devices`; sequences beyond `long_from` turn otherwise."""

    def __init__(
        self,
        rotations: Sequence[Rotation],
        long_from: int | None,
        dtype: torch.dtype,
        devices: Sequence[torch.device],
    ) -> None:
        self._rotations = tuple(rotation.to(devices[0]) for rotation in rotations)
        self._long_from = long_from
        self._dtype = dtype
        self._devices = devices

    def angles(self, positions: Tensor, end: int, totals: Tensor) -> list[Angles]:
        """Return those of each rotation at positions below `end`.

        `totals` are the lengths of the sequences that the positions are in. Shapes: [num_tokens].
        """
        angles = [rotation.at(positions, end, self._dtype) for rotation in self._rotations]
        return angles if self._long_from is None else [by_length(angles, totals > self._long_from)]

    def everywhere(self, angles: Sequence[Angles]) -> dict[torch.device, list[Angles]]:
        """Return the angles on every device."""
        return {
            device: [(cos.to(device), sin.to(device)) for cos, sin in angles]
            for device in self._devices
        }
