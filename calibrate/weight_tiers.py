"""The weight of one group of linear modules, treated in tiers and judged by its output error.

Tries plain rounding, then each tier that the recipe allows, and keeps a tier only where it lowers
the error of the group's output on tokens that nothing was fitted to: `tr((W - Q) H (W - Q)^T)` with
H the second moments of the inputs that the quantized model produces. The tiers themselves live in
`scale_search` (range), `compensation`, and `outliers`; which modules stay as they are is decided
before, in `sensitivity`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from quantkit.calibrate.compensation import Curvature, compensate, curvature, row_errors
from quantkit.calibrate.moments import InputMoments
from quantkit.calibrate.outliers import choose_columns
from quantkit.calibrate.scale_search import count_clipped, search_scale
from quantkit.calibrate.tiers import Tiers
from quantkit.numerics import FORMATS, amax_to_scale, dequantize, quantize, tile_amax
from quantkit.scheme import Granularity, QuantSpec

RANGE, COMPENSATION, OUTLIERS, FORMAT = "range", "compensation", "outliers", "format"
MOST_ROWS = 8192
"""Rows that are treated at once where it makes no difference: a head has a row for every token. A
multiple of the rows of every block."""


@dataclass(frozen=True, slots=True)
class TieredWeight:
    """One way to quantize a weight [N, K], or several stacked by rows.

    codes [N, K]; scale, one a tile of `spec`; columns int64 [n] and exact bfloat16 [N, n] for input
    channels beside the codes; error float64 [N], the output error of each row where moments are
    known, else of the weight itself.
    """

    spec: QuantSpec
    codes: Tensor
    scale: Tensor
    error: Tensor
    tiers: tuple[str, ...] = ()
    columns: Tensor | None = None
    exact: Tensor | None = None
    judged_on_data: bool = False

    @classmethod
    def join(cls, parts: Sequence[TieredWeight]) -> TieredWeight:
        """Stack parts with scales of their own, in one format; the inverse of `rows`."""
        codes = torch.cat([part.codes.view(torch.uint8) for part in parts])
        return replace(
            parts[0],
            codes=codes.view(parts[0].codes.dtype),
            scale=torch.cat([part.scale for part in parts]),
            error=torch.cat([part.error for part in parts]),
            tiers=tuple(dict.fromkeys(tier for part in parts for tier in part.tiers)),
            judged_on_data=any(part.judged_on_data for part in parts),
        )

    def rows(self, start: int, end: int) -> TieredWeight:
        """Return the part for rows start .. end - 1 of a stack; a scale for all rows is copied."""
        return replace(
            self,
            codes=self.codes.view(torch.uint8)[start:end].view(self.codes.dtype),
            scale=self.scale if self.scale.shape[0] == 1 else self.scale[start:end],
            error=self.error[start:end],
            exact=None if self.exact is None else self.exact[start:end],
        )

    def values(self) -> Tensor:
        """Return the weight that the codes stand for, exact columns in place. float32 [N, K]."""
        tile = self.spec.tile(*self.codes.shape)
        values = dequantize(self.codes, self.scale, self.spec.fmt, tile)
        if self.columns is not None and self.exact is not None:
            values[:, self.columns] = self.exact.float()
        return values

    def num_clipped(self, weight: Tensor) -> Tensor:
        """Count elements beyond the largest code, per tile. Shapes: int64, as scale."""
        tile = self.spec.tile(*self.codes.shape)
        return count_clipped(weight.float(), self.scale, self.spec.fmt, tile)


@dataclass(frozen=True, slots=True)
class TierChoice:
    """What was chosen for a weight, beside plain rounding and the power of the output.

    signal: float64 [N], `w H w^T` of every row with the moments that judge.
    """

    chosen: TieredWeight
    plain: TieredWeight
    signal: Tensor

    @classmethod
    def join(cls, parts: Sequence[TierChoice]) -> TierChoice:
        """Stack the choices for parts of one weight; the inverse of `split`."""
        return cls(
            TieredWeight.join([part.chosen for part in parts]),
            TieredWeight.join([part.plain for part in parts]),
            torch.cat([part.signal for part in parts]),
        )

    def split(self, rows: Sequence[int]) -> list[TierChoice]:
        """Return the choice for each of the stacked weights, which have `rows` rows each."""
        if len(rows) == 1:
            return [self]
        ends = list(accumulate(rows))
        return [
            TierChoice(
                self.chosen.rows(end - count, end),
                self.plain.rows(end - count, end),
                self.signal[end - count : end],
            )
            for count, end in zip(rows, ends, strict=True)
        ]


def choose_tiers(
    weight: Tensor, moments: InputMoments | None, spec: QuantSpec, tiers: Tiers
) -> TierChoice:
    """Quantize a weight by the best of the tiers that the recipe allows.

    Shapes: weight [N, K], of modules that read one input stacked by rows. Without moments only
    plain rounding is possible. A weight of more than MOST_ROWS rows is treated in parts, each by
    what suits it, unless its rows must agree: on one scale, a format, or exact columns.
    """
    curve = curvature(moments.fit) if moments else None
    agree = spec.granularity is Granularity.TENSOR or not tiers.is_portable
    if len(weight) <= MOST_ROWS or agree:
        return _choose(weight, moments, curve, spec, tiers)
    parts = torch.split(weight, MOST_ROWS)
    return TierChoice.join([_choose(part, moments, curve, spec, tiers) for part in parts])


def _choose(
    weight: Tensor,
    moments: InputMoments | None,
    curve: Curvature | None,
    spec: QuantSpec,
    tiers: Tiers,
) -> TierChoice:
    wide = weight.float()
    judge = moments.judge if moments else None
    plain = _plain(wide, spec, judge)
    best = plain
    if moments is not None and curve is not None:
        for candidate in _candidates(wide, moments, curve, spec, tiers):
            error = _errors(wide, candidate, judge)
            judged = replace(candidate, error=error, judged_on_data=True)
            if judged.error.sum() < best.error.sum():
                best = judged
    signal = row_errors(wide, judge) if judge is not None else wide.double().square().sum(dim=1)
    return TierChoice(best, plain, signal)


def _plain(weight: Tensor, spec: QuantSpec, judge: Tensor | None) -> TieredWeight:
    tile = spec.tile(*weight.shape)
    scale = amax_to_scale(tile_amax(weight, tile), spec.fmt)
    plain = TieredWeight(spec, quantize(weight, scale, spec.fmt, tile), scale, torch.empty(0))
    error = _errors(weight, plain, judge)
    return replace(plain, error=error, judged_on_data=judge is not None)


def _candidates(
    weight: Tensor, moments: InputMoments, curve: Curvature, spec: QuantSpec, tiers: Tiers
) -> Iterator[TieredWeight]:
    """Yield the treatments to try, cheap ones first; errors are still to be judged."""
    for name in dict.fromkeys((spec.format, *tiers.formats)):
        tried = replace(spec, format=name)
        applied = () if name == spec.format else (FORMAT,)
        yield from _treat(weight, curve, tried, tiers, applied, None)
        if tiers.outlier_columns:
            columns = choose_columns(weight, curve.importance, tiers.outlier_columns)
            beside = curvature(moments.fit, exact=columns)
            yield from _treat(weight, beside, tried, tiers, (*applied, OUTLIERS), columns)


def _treat(
    weight: Tensor,
    curve: Curvature,
    spec: QuantSpec,
    tiers: Tiers,
    applied: tuple[str, ...],
    columns: Tensor | None,
) -> Iterator[TieredWeight]:
    """Yield the treatments of one format, with or without exact columns."""
    fmt, tile = FORMATS[spec.format], spec.tile(*weight.shape)
    rounded = weight
    if columns is not None:
        rounded = weight.clone()
        rounded[:, columns] = 0.0  # they set no scale
    scale = amax_to_scale(tile_amax(rounded, tile), fmt)
    unjudged = torch.empty(0)
    if tiers.range:
        scale = search_scale(rounded, curve.importance, fmt, tile).scale
        applied = (*applied, RANGE)
    if not tiers.compensation or columns is None:
        codes = quantize(rounded, scale, fmt, tile)
        exact = None if columns is None else weight[:, columns].bfloat16()
        yield TieredWeight(spec, codes, scale, unjudged, applied, columns, exact)
    if tiers.compensation:
        found = compensate(weight, curve, scale, fmt, tile)
        exact = None if columns is None else found.exact
        applied = (*applied, COMPENSATION)
        yield TieredWeight(spec, found.codes, scale, unjudged, applied, columns, exact)


def _errors(weight: Tensor, candidate: TieredWeight, judge: Tensor | None) -> Tensor:
    error = weight - candidate.values()
    return row_errors(error, judge) if judge is not None else error.double().square().sum(dim=1)
