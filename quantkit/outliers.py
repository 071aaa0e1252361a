"""Outlier columns of a linear layer: input channels whose weights stay in bfloat16.

The other channels' weights are 8-bit codes, which are 0 in these columns, or else both count. What
`quantkit.ops` takes, and what its reference kernels and its product of many rows make of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.op_checks import check_tensor, dtype_name, fail


class Outliers(NamedTuple):
    """Columns of a weight [N, K], and what is added there.

    Shapes: columns int32 [n], ascending, below K; weight bfloat16 [n, N], a row for each column, so
    that neighbouring output features lie side by side.
    """

    columns: Tensor
    weight: Tensor

    def to(self, device: torch.device) -> Outliers:
        """Return the same columns on another device."""
        return Outliers(self.columns.to(device), self.weight.to(device))

    def add_to(self, y: Tensor, x: Tensor) -> Tensor:
        """Return float32 `y + x[:, columns] @ weight`. Shapes: y [M, N], x [M, K] -> [M, N]."""
        chosen = x.index_select(1, self.columns).float()
        return torch.addmm(y.float(), chosen, self.weight.float())

    def add_to_weight(self, dense: Tensor) -> Tensor:
        """Add the columns to a weight [N, K] in place, in its dtype; return it."""
        return dense.index_add_(1, self.columns, self.weight.T.to(dense.dtype))


def check_outliers(
    op: str, columns: Tensor | None, weight: Tensor | None, shape: torch.Size
) -> Outliers | None:
    """Return the columns of a weight of shape [N, K], checked as the C++ kernels do.

    Raises UnsupportedError naming the argument that does not fit.
    """
    if columns is None or weight is None:
        if (columns is None) != (weight is None):
            given, missing = ("outlier_columns", "outlier_weight")[:: 1 if weight is None else -1]
            fail(op, missing, f"given with {given}", None)
        return None
    if columns.dtype != torch.int32:
        fail(op, "outlier_columns", "int32", dtype_name(columns.dtype))
    check_tensor(op, "outlier_columns", columns, "[n]", (None,))
    if weight.dtype != torch.bfloat16:
        fail(op, "outlier_weight", "bfloat16", dtype_name(weight.dtype))
    check_tensor(op, "outlier_weight", weight, "[n, N]", (len(columns), shape[0]))
    outside = columns[(columns < 0) | (columns >= shape[1])]
    if outside.numel():
        fail(op, "outlier_columns", f"in [0, {shape[1]})", int(outside[0]))
    return Outliers(columns, weight)
