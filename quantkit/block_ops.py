"""The custom op of products whose scales change along K: weights in blocks of 128 x 128 (W8A8).

Schema, fake kernel and a reference kernel in torch; the CUDA kernel, for compute capability 9.0, is
csrc/cuda/block_scaled_mm_*.cu. One scale a row is `scaled_ops`.
"""

from __future__ import annotations

from math import ceil
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.errors import UnsupportedError
from quantkit.numerics import expand_scale
from quantkit.op_checks import check_float, check_products, check_scale
from quantkit.row_ops import QuantizedRows, quantize_rows
from quantkit.scaled_ops import MULTIPLE

BLOCK: Final = 128
"""Rows and columns of weights that share a scale, and columns of a row of inputs."""


def quantize_groups(x: Tensor) -> QuantizedRows:
    """Round x to E4M3 codes, every `BLOCK` columns of a row with a scale of their own.

    Shapes: [num_tokens, features], features a multiple of BLOCK -> codes alike, scales float32
    [num_tokens, features / BLOCK]. A scale is amax / 448 as in `quantize_rows`.
    """
    if x.shape[1] % BLOCK:
        raise UnsupportedError(f"groups of {BLOCK} columns do not fit {x.shape[1]}")
    groups = quantize_rows(x.reshape(-1, BLOCK))
    return QuantizedRows(
        groups.codes.view(x.shape), groups.scales.view(len(x), x.shape[1] // BLOCK)
    )


def block_scaled_mm(
    rows: QuantizedRows,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return `(codes * scales) @ (weight * weight_scale).T + bias`, in `dtype`.

    Sums of BLOCK columns are scaled and added in float32; one rounding at the end. Shapes: rows as
    `quantize_groups` returns them, [M, K] and [M, K / BLOCK]; weight E4M3 [N, K], K a multiple of
    BLOCK and N of `MULTIPLE`; weight_scale float32 [ceil(N / BLOCK), K / BLOCK]; bias [N] in any
    float dtype -> [M, N]. Raises as `ops.fp8_linear`.
    """
    scales = F.pad(rows.scales, (0, 0, 0, -len(rows.scales) % 4)).T.contiguous()
    op = torch.ops.quantkit.block_scaled_mm
    y: Tensor = op(rows.codes, scales, weight, weight_scale, bias, dtype)
    return y


torch.library.define(
    "quantkit::block_scaled_mm",
    "(Tensor a, Tensor a_scale, Tensor weight, Tensor weight_scale, Tensor? bias,"
    " ScalarType dtype) -> Tensor",
)


@torch.library.impl("quantkit::block_scaled_mm", "default")
def _block_scaled_mm_reference(
    a: Tensor,
    a_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`a_scale` is float32 [K / BLOCK, M rounded up to 4]: the kernel loads 4 numbers at once."""
    _check(a, a_scale, weight, weight_scale, bias, dtype)
    scales = a_scale[:, : len(a)].T.contiguous()
    x = a.float() * expand_scale(scales, tuple(a.shape), (1, BLOCK))
    dense = weight.float() * expand_scale(weight_scale, tuple(weight.shape), (BLOCK, BLOCK))
    return F.linear(x, dense, None if bias is None else bias.float()).to(dtype)


def _check(
    a: Tensor,
    a_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> None:
    op = "block_scaled_mm"
    check_products(op, a, weight, bias, (MULTIPLE, BLOCK))
    rows, columns = weight.shape
    groups = columns // BLOCK
    letters = "[K / 128, M rounded up to 4]"
    check_scale(op, "a_scale", a_scale, letters, (groups, -(-len(a) // 4) * 4))
    letters = "[ceil(N / 128), K / 128]"
    check_scale(op, "weight_scale", weight_scale, letters, (ceil(rows / BLOCK), groups))
    check_float(op, "dtype", dtype)


def _block_scaled_mm_fake(
    a: Tensor,
    a_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return a.new_empty(a.shape[0], weight.shape[0], dtype=dtype)


torch.library.register_fake("quantkit::block_scaled_mm", _block_scaled_mm_fake)
