"""How a model's divergence spreads over tokens: by size, and by how much context a token has.

Bins are the same in every run, so that reports can be compared. Pure numbers; draws nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST, LAST, PER_DECADE = -8, 2, 8
"""KL from 1e-8 to 1e2 nats in eighths of a decade; what lies outside counts at the end."""


@dataclass(frozen=True, slots=True)
class PositionBin:
    """Tokens with `first` to `last` tokens before them in their window, BOS counted."""

    first: int
    last: int
    count: int
    mean_kl: float
    standard_error: float | None


@dataclass(frozen=True, slots=True)
class Distribution:
    """KL(original || model) over tokens: counts by size, and means by position in the window.

    `counts[i]` tokens have a KL in [edges[i], edges[i + 1]).
    """

    edges: list[float]
    counts: list[int]
    by_position: list[PositionBin]

    @classmethod
    def of(cls, kl: NDArray[np.float64], context: NDArray[np.int64]) -> Distribution:
        """Sort tokens into bins. Shapes: kl and context (tokens before each) [n]."""
        edges = np.logspace(FIRST, LAST, (LAST - FIRST) * PER_DECADE + 1)
        inside = np.clip(kl, edges[0], np.nextafter(edges[-1], 0))
        counts, _ = np.histogram(inside, edges)
        return cls(edges.tolist(), counts.tolist(), _by_position(kl, context))


def _by_position(kl: NDArray[np.float64], context: NDArray[np.int64]) -> list[PositionBin]:
    """Average over bins that double in width: 1, 2 to 3, 4 to 7 and so on."""
    found = []
    number = np.frexp(context)[1]  # of a power of two: 1 -> 1, 2 and 3 -> 2, 4 to 7 -> 3
    for each in np.unique(number).tolist():
        inside = number == each
        values = kl[inside]
        error = None
        if len(values) > 1:
            error = float(values.std(ddof=1) / np.sqrt(len(values)))
        first, last = int(context[inside].min()), int(context[inside].max())
        found.append(PositionBin(first, last, len(values), float(values.mean()), error))
    return found


def tail(distribution: Distribution) -> tuple[list[float], list[float]]:
    """Return KL and the share of tokens that have at least as much, for every bin that matters."""
    counts: Any = np.array(distribution.counts)
    above = counts[::-1].cumsum()[::-1] / max(counts.sum(), 1)
    used = np.nonzero(above > 0)[0]
    return [distribution.edges[i] for i in used], above[used].tolist()
