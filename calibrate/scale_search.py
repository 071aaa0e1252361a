"""Choose the scale of a weight by trying: the one with the least error on the data, not plain amax.

Owns the candidates and the error that ranks them. Knows tensors and tiles; what the second moments
were observed on, and what is done with the scale afterwards, is up to the caller.

The rounding error of a float format depends on where values lie between two powers of two, so the
error is a wave in the logarithm of the scale. Scales above amax / max cost nothing but the smallest
values; scales below it clip. Both are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from quantkit.errors import CalibrationError
from quantkit.numerics import (
    CHUNK_ELEMENTS,
    Format,
    Tile,
    amax_to_scale,
    round_to_format,
    tile_amax,
)
from quantkit.rounding_ops import scale_errors

RATIOS: tuple[float, ...] = tuple(2.0 ** (step / 12) for step in range(-6, 13))
"""Candidates, as multiples of amax / max: from clipping at 0.71 amax to an octave above it."""


@dataclass(frozen=True, slots=True)
class SearchedScale:
    """The chosen scales and what they cost; every tensor is a grid with one value a tile.

    scale: float32, as `numerics.amax_to_scale` makes them. num_clipped: int64, elements beyond the
    largest code. plain_error, error: float64, the weighted squared error of rounding with the scale
    from amax and with `scale`; error <= plain_error.
    """

    scale: Tensor
    num_clipped: Tensor
    plain_error: Tensor
    error: Tensor


def search_scale(
    weight: Tensor,
    moments: Tensor | None,
    fmt: Format,
    tile: Tile,
    *,
    ratios: Sequence[float] = RATIOS,
) -> SearchedScale:
    """Choose each tile's scale among `amax * ratio / fmt.max` by weighted squared error.

    The error of a tile is `sum_nk H_kk (W_nk - W'_nk)^2`, where W' is W rounded with the scale and
    H = E[x x^T] are the inputs' second moments (or what compensation leaves of them). A tie goes to
    the scale from amax, which is always a candidate.

    Shapes: weight [N, K]; moments [K, K], its diagonal [K], or None for an unweighted error. With
    one scale for several fused weights, pass them stacked by rows.
    Raises CalibrationError for moments of another shape, or ratios that are not positive.
    """
    importance = _importance(moments, weight)
    _check_ratios(ratios)
    amax = tile_amax(weight, tile)
    candidates = [amax_to_scale(amax * ratio, fmt) for ratio in (1.0, *ratios)]
    errors = _errors(weight, candidates, fmt, tile, importance)
    best = errors.argmin(dim=0, keepdim=True)  # the first of equals
    # Where weights are not finite no error is least; amax says so loudest.
    best = torch.where(errors[:1].isnan(), 0, best)
    scale = torch.stack(candidates).gather(0, best)[0]
    return SearchedScale(
        scale,
        count_clipped(weight, scale, fmt, tile),
        errors[0],
        errors.gather(0, best)[0],
    )


def count_clipped(weight: Tensor, scale: Tensor, fmt: Format, tile: Tile) -> Tensor:
    """Return how many elements of each tile lie beyond the largest code: `|w| > fmt.max * scale`.

    Shapes: weight [N, K], scale one a tile -> int64, one a tile.
    """
    by_row = _rows_of(scale * fmt.max, weight.shape[0], tile)
    counts = torch.cat(
        [
            _sum_columns((part.abs() > _columns_of(limit, part, tile)).double(), tile)
            for part, limit in _chunks(weight, by_row)
        ]
    )
    return _sum_rows(counts, tile).long()


def _importance(moments: Tensor | None, weight: Tensor) -> Tensor:
    """Return what an error in each column costs, float32 [K]."""
    columns = weight.shape[1]
    if moments is None:
        return torch.ones(columns, device=weight.device)
    if moments.shape not in ((columns,), (columns, columns)):
        raise CalibrationError(
            f"second moments have shape {list(moments.shape)}; a weight with {columns} columns "
            f"needs [{columns}] or [{columns}, {columns}]"
        )
    return moments.float() if moments.dim() == 1 else moments.diagonal().float()


def _check_ratios(ratios: Sequence[float]) -> None:
    if not all(0 < ratio < float("inf") for ratio in ratios):
        raise CalibrationError(f"ratios of a scale search must be above 0, got {list(ratios)}")


def _errors(
    weight: Tensor, candidates: Sequence[Tensor], fmt: Format, tile: Tile, importance: Tensor
) -> Tensor:
    """Return the weighted error of every tile with each scale, float64 [candidates, ..]."""
    rows, columns = weight.shape
    if tile[1] < columns:
        errors = [_tile_errors(weight, scale, fmt, tile, importance) for scale in candidates]
        return torch.stack(errors)
    scales = torch.stack([_rows_of(scale, rows, tile).squeeze(1) for scale in candidates])
    wide = weight.float().contiguous()
    by_row = scale_errors(wide, scales, importance.contiguous(), fmt)
    return torch.stack([_sum_rows(errors.unsqueeze(1), tile) for errors in by_row])


def _tile_errors(
    weight: Tensor, scale: Tensor, fmt: Format, tile: Tile, importance: Tensor
) -> Tensor:
    """Return the weighted error of every tile, float64. Shapes: importance [K]."""
    by_row = _rows_of(scale, weight.shape[0], tile)
    parts = []
    for part, row_scale in _chunks(weight, by_row):
        step = _columns_of(row_scale, part, tile)
        values = round_to_format(part.float() / step, fmt).mul_(step)
        error = values.sub_(part).square_().mul_(importance)
        parts.append(_sum_columns(error.double(), tile))
    return _sum_rows(torch.cat(parts), tile)


def _rows_of(grid: Tensor, rows: int, tile: Tile) -> Tensor:
    """Repeat a grid with one row a tile to one row for each of the matrix."""
    return grid.repeat_interleave(min(tile[0], rows), dim=0)[:rows]


def _columns_of(grid: Tensor, part: Tensor, tile: Tile) -> Tensor:
    """Repeat a grid with one column a tile to what broadcasts against `part`."""
    if grid.shape[1] == 1:
        return grid
    return grid.repeat_interleave(tile[1], dim=1)[:, : part.shape[1]]


def _chunks(weight: Tensor, by_row: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Cut the rows into pieces whose float32 intermediates stay in cache."""
    step = max(1, CHUNK_ELEMENTS // max(weight.shape[1], 1))
    starts = range(0, weight.shape[0], step)
    return [(weight[start : start + step], by_row[start : start + step]) for start in starts]


def _sum_columns(x: Tensor, tile: Tile) -> Tensor:
    """Add up each row's elements by column tile. Shapes: [n, K] -> [n, column tiles]."""
    tiles = ceil(x.shape[1] / tile[1])
    padded = torch.nn.functional.pad(x, (0, tiles * tile[1] - x.shape[1]))
    return padded.view(x.shape[0], tiles, tile[1]).sum(dim=2)


def _sum_rows(x: Tensor, tile: Tile) -> Tensor:
    """Add up rows by row tile. Shapes: [N, column tiles] -> [row tiles, column tiles]."""
    tiles = ceil(x.shape[0] / tile[0])
    padded = torch.nn.functional.pad(x, (0, 0, 0, tiles * tile[0] - x.shape[0]))
    return padded.view(tiles, tile[0], x.shape[1]).sum(dim=1)
