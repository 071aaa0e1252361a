from __future__ import annotations

import random

import pytest

from quantkit.runtime.verification import Draft, Guess
from quantkit.speculative.acceptance import Acceptance
from quantkit.speculative.controller import Controller
from quantkit.speculative.pace import SLACK, Pace
from quantkit.speculative.step_costs import StepCosts

ROW = 0.05
"""Steps that one row costs."""


def test_those_with_the_most_to_write_decide() -> None:
    assert Pace().behind([5, 9, 9 - SLACK, 1]) == [False, True, True, False]
    assert Pace().behind([4]) == [True]


def test_where_texts_end_by_themselves_any_may_be_the_last() -> None:
    pace = Pace()
    for _ in range(20):
        pace.observe(limited=False)
    assert pace.behind([5, 9]) == [True, True]
    for _ in range(20):
        pace.observe(limited=True)
    assert pace.behind([5, 9]) == [False, True]


def step_seconds(batch: int, rows: int) -> float:
    return 1.0 + ROW * (rows - 1)


def seconds_of_a_batch(pace: Pace, rates: list[float], length: int, seed: int) -> float:
    """Write `length` tokens of every sequence; drafts of sequence i are accepted at rates[i]."""
    generator = random.Random(seed)
    judge = Controller(StepCosts(step_seconds), Acceptance(), timed=False)
    judge.begin_texts()
    rooms, seconds = dict(enumerate([length] * len(rates))), 0.0
    while rooms:
        running = list(rooms)
        behind = pace.behind([rooms[n] for n in running])
        judge.begin_step(len(running), sum(behind))
        limits = [(rooms[n] - 1) * b for n, b in zip(running, behind, strict=True)]
        drafts = [
            Draft([0] * min(k, 5), [Guess("s", n, rates[n])] * min(k, 5))
            for n, k in zip(running, limits, strict=True)
        ]
        kept = judge.trim(drafts)
        counts = []
        for n, draft in zip(running, kept, strict=True):
            accepted = next(
                (k for k in range(len(draft)) if generator.random() > rates[n]), len(draft)
            )
            judge.acceptance.observe(draft, accepted, min(accepted + 1, len(draft)))
            counts.append(accepted + 1)
            rooms[n] -= accepted + 1
            if rooms[n] == 0:
                del rooms[n]
        rows = len(running) + sum(map(len, kept))
        counted = sum(c for c, b in zip(counts, behind, strict=True) if b)
        judge.observe_step(sum(counts), rows, 0.0, 1.0, counted)
        seconds += step_seconds(len(running), rows)
    return seconds


class Everyone(Pace):
    """Drafts for all, whoever is ahead."""

    def behind(self, rooms: object) -> list[bool]:
        return [True] * len(list(rooms))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "rates", [[0.9, 0.9, 0.9, 0.4, 0.4, 0.4, 0.4, 0.4], [0.8] * 4 + [0.2] * 4, [0.5] * 8]
)
def test_a_batch_is_done_sooner_when_nobody_runs_ahead(rates: list[float]) -> None:
    seeds = range(10)
    plain = 96 * step_seconds(8, 8)
    together = [seconds_of_a_batch(Pace(), rates, 96, seed) for seed in seeds]
    everyone = [seconds_of_a_batch(Everyone(), rates, 96, seed) for seed in seeds]
    assert sum(together) < 0.95 * sum(everyone)
    assert max(together) < plain / 0.97
