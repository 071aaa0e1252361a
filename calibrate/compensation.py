"""Round a weight so that its layer's output, not each number, comes out right.

Owns second-order error feedback (GPTQ, arXiv 2210.17323) on an 8-bit float grid whose scales are
given. Knows tensors only; who observes the moments, and on what, is up to the caller.

With H = E[x x^T] of the inputs that the quantized layer will see, the output error of Q for W is
`tr((W - Q) H (W - Q)^T)`; rows do not interact, so several weights that read one input may be
stacked. Write `H = A D A^T` with A unit upper triangular. Then the error is `sum_k D_k |r_k|^2`
with `r_k = w_k + sum_{j<k} A_jk (w_j - q_j) - q_k`, and rounding columns in order makes each r_k no
more than the error of one rounding (the form of arXiv 2307.13304, which needs no inverse of H).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import CalibrationError
from quantkit.numerics import Format, Tile, decode, encode, expand_scale, quantize
from quantkit.rounding_ops import feed_back

BLOCK_COLUMNS = 64
"""Columns that are rounded one by one between two matrix products."""
ERROR_COLUMNS = 192
"""Columns of which an output error is computed at once."""
DAMPING = 0.01
SHRINKAGE = 0.2


@dataclass(frozen=True, slots=True)
class Curvature:
    """How much an error in each column of a weight costs, prepared for rounding column by column.

    order: int64 [K], columns by descending energy, exact ones last. damped: float32 [K, K], H with
    damping, in that order. factor: float32 [K, K], A^T, or None where H stays singular.
    importance: float32 [K], in the weight's own order: the D_k of each column, which is what is
    left of its energy when the columns after it have made up for it as well as they can.
    num_exact: how many columns are not rounded to the format.
    """

    order: Tensor
    damped: Tensor
    factor: Tensor | None
    importance: Tensor
    num_exact: int = 0


@dataclass(frozen=True, slots=True)
class Compensated:
    """Codes [N, K], and the damped output error of every row, float64 [N].

    plain_error is that of plain rounding with the same scales; error <= plain_error in every row,
    because a row for which feedback does not pay keeps its plain rounding. exact: bfloat16
    [N, num_exact], the columns that stay beside the codes (which are 0 there), by ascending number.
    """

    codes: Tensor
    plain_error: Tensor
    error: Tensor
    exact: Tensor


def curvature(
    moments: Tensor,
    damping: float = DAMPING,
    shrinkage: float = SHRINKAGE,
    exact: Tensor | None = None,
) -> Curvature:
    """Prepare the second moments of a layer's inputs.

    damping is added to the diagonal of H, in units of its mean; shrinkage multiplies the diagonal
    by 1 + shrinkage: correlations differ between the calibration text and what the model will be
    used on, the energy of a channel much less so. exact: int64 [n], columns that will not be
    rounded, which therefore come last and make up for all others.

    Shapes: moments [K, K], a sum or a mean. Raises CalibrationError where they are not finite.
    """
    _check_finite("the second moments of its inputs", moments)
    damped = _damped(moments, damping, shrinkage)
    rank = damped.diagonal().clone()
    if exact is not None:
        rank[exact] = -1.0
    order = rank.argsort(descending=True, stable=True)
    ordered = damped[order][:, order]
    importance = torch.empty_like(rank)
    # Cholesky factors from the first column on; the feedback needs it from the last.
    lower, failed = torch.linalg.cholesky_ex(ordered.flip(0, 1))
    if failed.item():
        importance, factor = damped.diagonal(), None
    else:
        upper = lower.flip(0, 1)
        importance[order] = upper.diagonal().square()
        factor = (upper / upper.diagonal()).t().contiguous()
    num_exact = 0 if exact is None else len(exact)
    return Curvature(order, ordered, factor, importance, num_exact)


def compensate(
    weight: Tensor, curve: Curvature, scale: Tensor, fmt: Format, tile: Tile
) -> Compensated:
    """Quantize `weight` with the given scales so that `tr((W - Q) H (W - Q)^T)` becomes small.

    Zeros stay zero. A column without energy is rounded plainly, and so is everything where H is
    singular in spite of damping.

    Shapes: weight [N, K], stacked by rows where several share inputs; scale one a tile. Raises
    CalibrationError where the shapes do not fit or the weight is not finite.
    """
    _check(weight, curve)
    order, first_exact = curve.order, weight.shape[1] - curve.num_exact
    plain = quantize(weight, scale, fmt, tile)
    # Transposed, so that a column of the weight is contiguous.
    target = weight.float().t()[order].contiguous()
    scales = _column_scales(scale, weight.shape, tile, order, first_exact)
    plain_steps = decode(plain, fmt).t()[order]
    plain_steps[first_exact:] = target[first_exact:].bfloat16()
    before = _row_errors(target - plain_steps * scales, curve.damped)
    steps, after = plain_steps, before
    if curve.factor is not None:
        costs = curve.importance[order]
        steps, after = _feed_back(target, curve.factor, costs, scales, fmt, first_exact)
        steps = torch.where(after < before, steps, plain_steps)
    exact = steps[first_exact:].t()[:, order[first_exact:].argsort()].bfloat16()
    steps[first_exact:] = 0
    codes = torch.empty_like(plain.view(torch.uint8))
    codes[:, order] = encode(steps, fmt).view(torch.uint8).t()
    return Compensated(codes.view(plain.dtype), before, torch.minimum(before, after), exact)


def row_errors(error: Tensor, moments: Tensor) -> Tensor:
    """Return `e H e^T` of every row, H being symmetric.

    Shapes: error [N, K], moments [K, K] -> float64 [N].
    """
    return _row_errors(error.float().t(), moments)


def _check(weight: Tensor, curve: Curvature) -> None:
    columns, known = weight.shape[1], curve.order.shape[0]
    if columns != known:
        raise CalibrationError(
            f"second moments are of {known} input channels; the weight has {columns} columns"
        )
    _check_finite("the weight", weight)


def _check_finite(name: str, tensor: Tensor) -> None:
    if not tensor.isfinite().all():
        raise CalibrationError(
            f"{name} to compensate has NaN or infinite values; the model itself is broken here"
        )


def _damped(moments: Tensor, damping: float, shrinkage: float) -> Tensor:
    """Return H + shrinkage * diag H + damping * mean(diag H) * I in float32.

    With its rows and columns scaled to a unit diagonal it has no eigenvalue below shrinkage / (1 +
    shrinkage), so that factors in float32 are as good as the moments are.
    """
    damped = moments.to(torch.float32, copy=True)
    diagonal = damped.diagonal()
    diagonal += shrinkage * diagonal + damping * diagonal.mean()
    return damped


def _column_scales(
    scale: Tensor, shape: torch.Size, tile: Tile, order: Tensor, first_exact: int
) -> Tensor:
    """Return scales that broadcast against the transposed weight with its columns in `order`.

    Exact columns have the scale 1.
    """
    expanded = expand_scale(scale, shape, tile).t()
    if first_exact < shape[1]:
        expanded = expanded.expand(shape[1], -1)
    scales = (expanded if expanded.shape[0] == 1 else expanded[order]).contiguous()
    scales[first_exact:] = 1.0
    return scales


def _row_errors(error: Tensor, moments: Tensor) -> Tensor:
    """Return `e^T H e` of every column. Shapes: error [K, N], moments [K, K] -> float64 [N].

    H is symmetric: what is right of its diagonal blocks counts twice, what is left of them not.
    """
    total = error.new_zeros(error.shape[1], dtype=torch.float64)
    for start in range(0, len(error), ERROR_COLUMNS):
        end = start + ERROR_COLUMNS
        products = moments[start:end, start:end] @ error[start:end]
        if end < len(error):
            products.addmm_(moments[start:end, end:], error[end:], alpha=2.0)
        total += products.mul_(error[start:end]).sum(dim=0, dtype=torch.float64)
    return total


def _feed_back(
    target: Tensor,
    factor: Tensor,
    costs: Tensor,
    scales: Tensor,
    fmt: Format,
    first_exact: int,
) -> tuple[Tensor, Tensor]:
    """Round column after column, each aiming at what the errors before it left to do.

    Zeros are padding or pruned: they stay, and make up for nothing.
    Shapes: target [K, N], a column of the weight in each row; factor [K, K], A^T; costs [K], D;
    scales [K, N] or broadcastable to it. Returns code values [K, N], to be multiplied by the scales
    (from column `first_exact` on, bfloat16 values), and `sum_k D_k r_k^2`, float64 [N].
    """
    steps, error = torch.empty_like(target), torch.zeros_like(target)
    total = target.new_zeros(target.shape[1], dtype=torch.float64)
    for start in range(0, target.shape[0], BLOCK_COLUMNS):
        block = slice(start, start + BLOCK_COLUMNS)
        aims = torch.addmm(target[block], factor[block, :start], error[:start])
        within = factor[block, block].contiguous()
        used = (scales[block] if scales.shape[0] > 1 else scales).expand(-1, target.shape[1])
        steps[block], error[block], residual = feed_back(
            aims, target[block], within, used.contiguous(), first_exact - start, fmt
        )
        total += costs[block] @ residual.square_()
    return steps, total
