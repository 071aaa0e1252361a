"""One linear layer in 8 bits: codes, scales, and what multiplies without them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.numerics import Tile, dequantize, expand_scale
from quantkit.scheme import QuantSpec


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """One linear layer as stored.

    Shapes: codes [N, K]; scale as `spec.scale_shape` says, float32; bias [N] or None;
    input_scale float32 [1] or None (None unless the inputs are quantized statically); columns
    int32 [n] and exact [N, n], input channels whose weights are not in the codes (0 there).
    """

    codes: Tensor
    scale: Tensor
    spec: QuantSpec
    bias: Tensor | None = None
    input_scale: Tensor | None = None
    columns: Tensor | None = None
    exact: Tensor | None = None

    @property
    def tile(self) -> Tile:
        """Rows and columns of the codes that share one scale."""
        return self.spec.tile(*self.codes.shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight [N, K] as `codes * scale`, computed in float32, rounded to dtype."""
        grid = self.spec.grid(self.scale)
        values = dequantize(self.codes, grid, self.spec.fmt, self.tile, dtype)
        if self.columns is not None and self.exact is not None:
            values[:, self.columns.long()] = self.exact.to(dtype)
        return values

    def row_scales(self) -> tuple[Tensor, int]:
        """Return scales per output row and column group, and the group's size.

        Every granularity has this one form, so a kernel needs no other, and fused layers can be
        stacked by rows: float32 [N, ceil(K / group_size)]; tensor and channel have group_size K.
        """
        rows, columns = self.codes.shape
        grid = expand_scale(self.spec.grid(self.scale), (rows, self.scale.shape[-1]), self.tile)
        grid = grid.expand(rows, grid.shape[1]).contiguous()
        return grid, columns if grid.shape[1] == 1 else self.tile[1]
