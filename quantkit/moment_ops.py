"""Custom op that takes second moments, for calibration.

Schema, fake kernel and a reference kernel in torch; the CPU's kernels (csrc/cpu/gram.cpp) compute
what is above the diagonal only, of pairs of bfloat16 numbers where the processor multiplies those.
They add up in another order than the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

import quantkit.extension  # noqa: F401 - adds the C++ kernels
from quantkit.op_checks import check_tensor, dtype_name, fail


def gram(rows: Tensor) -> Tensor:
    """Return `rows^T rows` with sums in float32, exactly symmetric.

    The sums of two columns are the same bits whatever other columns there are, and with any number
    of threads. Shapes: rows bfloat16 [tokens, K] -> float32 [K, K].
    """
    sums: Tensor = torch.ops.quantkit.gram(rows)
    return sums


torch.library.define("quantkit::gram", "(Tensor rows) -> Tensor")


@torch.library.impl("quantkit::gram", "default")
def _gram_reference(rows: Tensor) -> Tensor:
    if rows.dtype != torch.bfloat16:
        fail("gram", "rows", "bfloat16", dtype_name(rows.dtype))
    check_tensor("gram", "rows", rows, "[tokens, K]", (None, None))
    wide = rows.float()
    upper = (wide.t() @ wide).triu_()
    return upper + upper.triu(1).t()


def _gram_fake(rows: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[1], rows.shape[1], dtype=torch.float32)


torch.library.register_fake("quantkit::gram", _gram_fake)
