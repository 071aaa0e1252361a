"""Custom ops that try what rounding to an 8-bit format would do, for calibration.

Schema, fake kernel and a reference kernel in torch; the CPU's kernels (csrc/cpu/rounding.cpp) do in
one pass over memory what takes torch ten. `round_rows` gives the same bits in both; the others add
up in another order.
"""

from __future__ import annotations

import torch
from torch import Tensor

import quantkit.extension  # noqa: F401 - adds the C++ kernels
from quantkit.numerics import (
    CHUNK_ELEMENTS,
    FORMATS,
    Format,
    amax_to_scale,
    fake_quantize,
    round_to_format,
    tile_amax,
)
from quantkit.op_checks import check_float, check_scale, check_tensor, fail


def round_rows(x: Tensor, scale: Tensor | None, fmt: Format) -> Tensor:
    """Return what is left of x after storage in 8 bits, each row with its own scale or a given one.

    A row's own is `amax_to_scale(amax)`. Shapes: x [rows, columns]; scale float32 [rows], or [1]
    for all -> as x.
    """
    out: Tensor = torch.ops.quantkit.round_rows(x, scale, fmt.name)
    return out


def scale_errors(weight: Tensor, scales: Tensor, importance: Tensor, fmt: Format) -> Tensor:
    """Return each row's `sum_k importance_k (w_k - w'_k)^2`, w' being w rounded with each scale.

    Shapes: weight float32 [N, K]; scales float32 [candidates, N], or [candidates, 1] for all rows;
    importance float32 [K] -> float64 [candidates, N].
    """
    errors: Tensor = torch.ops.quantkit.scale_errors(weight, scales, importance, fmt.name)
    return errors


def feed_back(
    aims: Tensor, target: Tensor, factor: Tensor, scales: Tensor, first_exact: int, fmt: Format
) -> tuple[Tensor, Tensor, Tensor]:
    """Round a block of columns, each aiming at what the errors before it in the block left to do.

    With `a_k = aims_k + sum_{j<k} factor_kj error_j`, a column becomes `steps_k = round(a_k /
    scales_k)`, or a bfloat16 number from column `first_exact` on, and 0 where the target is 0;
    `error_k = target_k - steps_k scales_k` and `residual_k = a_k - steps_k scales_k`.
    Shapes: a column in each row, float32: aims, target [B, N]; factor [B, B]; scales [B, N] or
    [1, N] -> steps, error, residual [B, N].
    """
    op = torch.ops.quantkit.feed_back
    steps, error, residual = op(aims, target, factor, scales, first_exact, fmt.name)
    return steps, error, residual


torch.library.define("quantkit::round_rows", "(Tensor x, Tensor? scale, str format) -> Tensor")
torch.library.define(
    "quantkit::scale_errors",
    "(Tensor weight, Tensor scales, Tensor importance, str format) -> Tensor",
)
torch.library.define(
    "quantkit::feed_back",
    "(Tensor aims, Tensor target, Tensor factor, Tensor scales, int first_exact, str format)"
    " -> (Tensor, Tensor, Tensor)",
)


def _format(op: str, name: str) -> Format:
    if name not in FORMATS:
        fail(op, "format", "e4m3, e5m2 or e3m4", repr(name))
    return FORMATS[name]


@torch.library.impl("quantkit::round_rows", "default")
def _round_rows_reference(x: Tensor, scale: Tensor | None, format: str) -> Tensor:
    op = "round_rows"
    fmt = _format(op, format)
    check_float(op, "x", x.dtype)
    check_tensor(op, "x", x, "[rows, columns]", (None, None))
    rows, columns = x.shape
    if scale is None:
        scale = amax_to_scale(tile_amax(x, (1, columns)), fmt).view(-1)[:rows]
    is_shared = scale.shape == (1,)
    check_scale(op, "scale", scale, "[rows] or [1]", (1 if is_shared else rows,))
    tile = (max(rows, 1), columns) if is_shared else (1, columns)
    return fake_quantize(x, scale.view(-1, 1), fmt, tile)


@torch.library.impl("quantkit::scale_errors", "default")
def _scale_errors_reference(
    weight: Tensor, scales: Tensor, importance: Tensor, format: str
) -> Tensor:
    op = "scale_errors"
    fmt = _format(op, format)
    check_scale(op, "weight", weight, "[N, K]", (None, None))
    rows, columns = weight.shape
    is_shared = scales.ndim == 2 and scales.shape[1] == 1
    check_scale(
        op, "scales", scales, "[candidates, N] or [.., 1]", (None, 1 if is_shared else rows)
    )
    check_scale(op, "importance", importance, "[K]", (columns,))
    errors = weight.new_empty(len(scales), rows, dtype=torch.float64)
    step = max(1, CHUNK_ELEMENTS // max(columns, 1))  # pieces that stay in cache
    for number, scale in enumerate(scales.unsqueeze(2)):
        for start in range(0, rows, step):
            part = weight[start : start + step]
            used = scale if is_shared else scale[start : start + step]
            error = round_to_format(part / used, fmt).mul_(used).sub_(part)
            errors[number, start : start + step] = (error.square_() @ importance).double()
    return errors


@torch.library.impl("quantkit::feed_back", "default")
def _feed_back_reference(
    aims: Tensor, target: Tensor, factor: Tensor, scales: Tensor, first_exact: int, format: str
) -> tuple[Tensor, Tensor, Tensor]:
    op = "feed_back"
    fmt = _format(op, format)
    check_scale(op, "aims", aims, "[B, N]", (None, None))
    columns, rows = aims.shape
    is_shared = scales.ndim == 2 and scales.shape[0] == 1
    check_scale(op, "target", target, "[B, N]", (columns, rows))
    check_scale(op, "factor", factor, "[B, B]", (columns, columns))
    check_scale(op, "scales", scales, "[B, N] or [1, N]", (1 if is_shared else columns, rows))
    steps, error, residual = (torch.empty_like(aims) for _ in range(3))
    is_zero = target == 0
    for k in range(columns):
        scale = scales[0 if is_shared else k]
        aim = aims[k]
        if k:
            aim = torch.addmv(aim, error[:k].t(), factor[k, :k])
        step = round_to_format(aim / scale, fmt) if k < first_exact else aim.bfloat16().float()
        steps[k] = step.masked_fill_(is_zero[k], 0.0)
        torch.addcmul(target[k], steps[k], scale, value=-1, out=error[k])
        torch.addcmul(aim, steps[k], scale, value=-1, out=residual[k])
    return steps, error, residual


def _round_rows_fake(x: Tensor, scale: Tensor | None, format: str) -> Tensor:
    return torch.empty_like(x)


def _scale_errors_fake(weight: Tensor, scales: Tensor, importance: Tensor, format: str) -> Tensor:
    return weight.new_empty(len(scales), len(weight), dtype=torch.float64)


def _feed_back_fake(
    aims: Tensor, target: Tensor, factor: Tensor, scales: Tensor, first_exact: int, format: str
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(aims), torch.empty_like(aims), torch.empty_like(aims)


torch.library.register_fake("quantkit::round_rows", _round_rows_fake)
torch.library.register_fake("quantkit::scale_errors", _scale_errors_fake)
torch.library.register_fake("quantkit::feed_back", _feed_back_fake)
