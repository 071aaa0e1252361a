"""The rotary embedding's angles, by position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Rotation:
    """Angles of the rotary embedding, in tables that grow with the longest sequence.

    `frequencies` are radians per position of each pair, float32 [rotary_dim / 2]; `factor`
    multiplies cos and sin.
    """

    def __init__(self, frequencies: Tensor, factor: float) -> None:
        self._frequencies = frequencies
        self._factor = factor
        self._tables: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def to(self, device: torch.device) -> Rotation:
        """Return the same rotation for positions on another device."""
        return Rotation(self._frequencies.to(device), self._factor)

    def at(self, positions: Tensor, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [num_tokens, rotary_dim], of positions below `end`."""
        if positions.is_cuda:  # a recorded graph must not read a table that may be replaced
            return self._compute(positions, dtype)
        cos, sin = self.tables(end, dtype)
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def tables(self, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin of all positions below `end`, and perhaps more."""
        cos, sin = self._tables.get(dtype) or self._table(256, dtype)
        return (cos, sin) if len(cos) >= end else self._table(max(end, 2 * len(cos)), dtype)

    def _table(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        positions = torch.arange(length, device=self._frequencies.device)
        self._tables[dtype] = self._compute(positions, dtype)
        return self._tables[dtype]

    def _compute(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions.float().unsqueeze(1) * self._frequencies
        angles = torch.cat((angles, angles), dim=1)
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        return cos.to(dtype), sin.to(dtype)


def by_length(angles: Sequence[tuple[Tensor, Tensor]], is_long: Tensor) -> tuple[Tensor, Tensor]:
    """Return the second cos and sin for tokens of long sequences, the first for others.

    Shapes: two of ([num_tokens, rotary_dim], the same), bool [num_tokens] -> one of them.
    """
    (cos, sin), (long_cos, long_sin) = angles
    rows = is_long.unsqueeze(1)
    return torch.where(rows, long_cos, cos), torch.where(rows, long_sin, sin)
