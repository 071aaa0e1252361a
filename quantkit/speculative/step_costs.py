"""What a pass of the target costs: seconds by number of sequences and of rows.

Measured once for each size of batch, when drafts first come up there, on a cache of its own.
Afterwards every real step corrects the level, which the length of the context moves.
"""

from __future__ import annotations

import itertools
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence

import torch

from quantkit.ops import FEW_ROWS
from quantkit.runtime.engine import Engine, SequenceCache

WIDTHS = (1, 2, 4, 8, 12, 16)
"""Rows of a sequence that are measured; between them costs are interpolated."""
MOST_ROWS = 64
"""Rows in total beyond which nothing is measured that two points show already."""
EDGES = (FEW_ROWS, FEW_ROWS + 1)
"""Rows in total that are measured too: other kernels take over here."""
ROUNDS = 4
"""Times that all numbers of rows are measured, in turn: what else runs only makes times longer, and
a spell of it would otherwise fall on some numbers alone."""
PATIENCE = 0.25
"""Seconds a pass, on average, after which there is no other round: large models need none."""
INERTIA = 0.9
"""Weight of the past in the running correction."""

Table = list[tuple[int, float]]
"""(rows in total, seconds), both growing."""


class StepCosts:
    """Seconds of a target pass over `rows` rows of `batch` sequences."""

    def __init__(self, measure: Callable[[int, int], float]) -> None:
        self._measure = measure
        self._tables: dict[int, Table] = {}
        self._corrections: dict[int, float] = {}

    @classmethod
    def of(cls, engine: Engine) -> StepCosts:
        """Return the costs of an engine, nothing of which is measured yet."""
        return cls(lambda batch, rows: measure_step(engine, batch, rows))

    @classmethod
    def nominal(cls) -> StepCosts:
        """Return costs in steps instead of seconds: one for every sequence, whatever is drafted."""
        return cls(lambda batch, rows: float(batch))

    def seconds(self, batch: int, rows: int) -> float:
        """Return the expected time of a step now."""
        bucket = self._bucket(batch)
        return self._corrections.get(bucket, 1.0) * _interpolate(self._table(bucket), rows)

    def observe(self, batch: int, rows: int, seconds: float) -> None:
        """Take in what a step took."""
        bucket = self._bucket(batch)
        ratio = seconds / _interpolate(self._table(bucket), rows)
        old = self._corrections.get(bucket, ratio)
        # One pause of the process must not turn drafting on or off.
        ratio = min(max(ratio, old / 2), 2 * old)
        self._corrections[bucket] = INERTIA * old + (1 - INERTIA) * ratio

    def prepare(self, batch: int) -> None:
        """Measure now what `seconds` needs to know about a batch."""
        self._table(self._bucket(batch))

    def measured_rows(self, batch: int) -> list[int]:
        """Return the numbers of rows that were measured, ascending."""
        return [rows for rows, _ in self._table(self._bucket(batch))]

    def _bucket(self, batch: int) -> int:
        """Return the batch size whose table serves: the largest power of two within."""
        return 1 << (batch.bit_length() - 1)

    def _table(self, batch: int) -> Table:
        if batch not in self._tables:
            rows = _rows_to_measure(batch)
            # More rows take no less time; where they seem to, it was noise.
            grown = itertools.accumulate(self._fewest_seconds(batch, rows), max)
            self._tables[batch] = list(zip(rows, grown, strict=True))
        return self._tables[batch]

    def _fewest_seconds(self, batch: int, rows: Sequence[int]) -> list[float]:
        fewest = [math.inf] * len(rows)
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            times = [self._measure(batch, number) for number in rows]
            fewest = [min(pair) for pair in zip(fewest, times, strict=True)]
            if time.perf_counter() - begin > 2 * PATIENCE * len(rows):  # each is run twice
                break
        return fewest


@torch.inference_mode()
def measure_step(engine: Engine, batch: int, rows: int) -> float:
    """Return the seconds of a pass over `rows` rows, dealt out to `batch` sequences."""
    counts = [rows // batch + (sequence < rows % batch) for sequence in range(batch)]
    counts = [min(count, engine.max_context - 1) for count in counts]
    cache = engine.new_cache(batch, max(counts) + 1)
    _run(engine, cache, [1] * batch)
    _run(engine, cache, counts)  # the first pass of a shape may prepare something
    for sequence in range(batch):
        cache.truncate(sequence, 1)
    begin = time.perf_counter()
    _run(engine, cache, counts)
    return time.perf_counter() - begin


def _run(engine: Engine, cache: SequenceCache, counts: list[int]) -> None:
    tokens = torch.zeros(sum(counts), dtype=torch.int64)
    engine.forward(tokens, range(len(counts)), counts, cache, last_only=False)
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)


def _rows_to_measure(batch: int) -> list[int]:
    wanted = [batch * width for width in WIDTHS]
    wanted = wanted[:2] + [rows for rows in wanted[2:] if rows <= MOST_ROWS]
    return sorted({*wanted, *(rows for rows in EDGES if batch < rows < wanted[-1])})


def _interpolate(table: Table, rows: int) -> float:
    """Return the seconds of `rows` rows; beyond the table they grow as its last part does."""
    after = min(max(bisect_right(table, (rows, float("inf"))), 1), len(table) - 1)
    (low, low_seconds), (high, high_seconds) = table[after - 1], table[after]
    share = (rows - low) / (high - low)
    return low_seconds + share * (high_seconds - low_seconds)
