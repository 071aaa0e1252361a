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
    fake_quantize,
    tile_amax,
)

RATIOS: tuple[float, ...] = tuple(2.0 ** (step / 16) for step in range(-8, 17))
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
    finalists: int = 0,
) -> SearchedScale:
    """Choose each tile's scale among `amax * ratio / fmt.max` by weighted squared error.

    The error of a tile is `sum_nk H_kk (W_nk - W'_nk)^2`, where W' is W rounded with the scale and
    H = E[x x^T] are the inputs' second moments. With a full H and finalists > 0, that many best
    candidates are ranked again by `e H e^T`, e a row of W - W' within the tile: what plain rounding
    does to the output. A tie goes to the scale from amax, which is always a candidate.

    Shapes: weight [N, K]; moments [K, K], its diagonal [K], or None for an unweighted error. With
    one scale for several fused weights, pass them stacked by rows.
    Raises CalibrationError for moments of another shape, or ratios that are not positive.
    """
    diagonal, full = _split_moments(moments, weight, finalists)
    _check_ratios(ratios)
    amax = tile_amax(weight, tile)
    candidates = [amax_to_scale(amax * ratio, fmt) for ratio in (1.0, *ratios)]
    errors = torch.stack([_tile_errors(weight, s, fmt, tile, diagonal) for s in candidates])
    if full is not None:
        errors = _rank_finalists(weight, candidates, errors, fmt, tile, full, finalists)
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


def _split_moments(
    moments: Tensor | None, weight: Tensor, finalists: int
) -> tuple[Tensor, Tensor | None]:
    """Return (diagonal [K], full matrix or None) in float32."""
    columns = weight.shape[1]
    if moments is None:
        return torch.ones(columns, device=weight.device), None
    if moments.shape not in ((columns,), (columns, columns)):
        raise CalibrationError(
            f"second moments have shape {list(moments.shape)}; a weight with {columns} columns "
            f"needs [{columns}] or [{columns}, {columns}]"
        )
    if moments.dim() == 1:
        return moments.float(), None
    return moments.diagonal().float(), moments.float() if finalists else None


def _check_ratios(ratios: Sequence[float]) -> None:
    if not all(0 < ratio < float("inf") for ratio in ratios):
        raise CalibrationError(f"ratios of a scale search must be above 0, got {list(ratios)}")


def _tile_errors(weight: Tensor, scale: Tensor, fmt: Format, tile: Tile, moments: Tensor) -> Tensor:
    """Return the weighted error of every tile, float64.

    Shapes: moments [K] (its diagonal) or [K, K].
    """
    by_row = _rows_of(scale, weight.shape[0], tile)
    parts = []
    for part, row_scale in _chunks(weight, by_row):
        values = fake_quantize(part.float(), row_scale, fmt, (1, tile[1]))
        parts.append(_row_errors(values.sub_(part), tile, moments))
    return _sum_rows(torch.cat(parts), tile)


def _row_errors(error: Tensor, tile: Tile, moments: Tensor) -> Tensor:
    """Return each row's error by column tile. Shapes: error [n, K] -> float64 [n, column tiles]."""
    if moments.dim() == 1:
        if tile[1] >= error.shape[1]:
            return (error.square_() @ moments).double().unsqueeze(1)
        return _sum_columns(error.square_().mul_(moments).double(), tile)
    columns = [slice(start, start + tile[1]) for start in range(0, error.shape[1], tile[1])]
    within = [(error[:, c] @ moments[c, c] * error[:, c]).double().sum(dim=1) for c in columns]
    return torch.stack(within, dim=1)


def _rank_finalists(
    weight: Tensor,
    candidates: Sequence[Tensor],
    errors: Tensor,
    fmt: Format,
    tile: Tile,
    moments: Tensor,
    finalists: int,
) -> Tensor:
    """Return errors by the full moments for each tile's best candidates, infinity for the others.

    The scale from amax takes part in any case. Shapes: errors [candidates, tile grid].
    """
    chosen = errors.argsort(dim=0, stable=True)[:finalists]
    stacked = torch.stack(list(candidates))
    ranked = torch.full_like(errors, torch.inf)
    ranked[0] = _tile_errors(weight, candidates[0], fmt, tile, moments)
    for index in chosen:
        scale = stacked.gather(0, index.unsqueeze(0))[0]
        error = _tile_errors(weight, scale, fmt, tile, moments)
        ranked.scatter_(0, index.unsqueeze(0), error.unsqueeze(0))
    return ranked


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
