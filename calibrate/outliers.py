"""Which input channels of a linear layer stay in bfloat16 beside the 8-bit matrix.

The idea of LLM.int8 (arXiv 2208.07339) for 8-bit floats: a few channels carry most of the energy,
so their columns are worth 2 bytes a weight. Owns the choice; what the other columns make of it is
`compensation`'s part.
"""

from __future__ import annotations

import torch
from torch import Tensor


def choose_columns(weight: Tensor, importance: Tensor, share: float) -> Tensor:
    """Return the columns whose rounding would cost the output most: int64 [n], ascending.

    A float format errs in proportion to the value, so column k costs about
    `importance_k * |W_k|^2`. n is `share` of the columns, at least 1.

    Shapes: weight [N, K]; importance [K].
    """
    cost = importance * weight.float().square().sum(dim=0)
    count = max(1, int(share * weight.shape[1]))
    return torch.topk(cost, count).indices.sort().values
