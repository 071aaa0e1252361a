"""Judges with a fixed opinion."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.runtime.verification import Guess


class FixedJudge:
    """Drafting pays, or it does not; a draft is worth its length, one to come `prospects`."""

    def __init__(self, answer: bool = True, prospects: float = 0.0) -> None:
        self.answer = answer
        self.prospects = prospects
        self.asked: list[tuple[str, int, int]] = []

    def chance(self, guess: Guess, place: int) -> float:
        return guess.prior

    def pays(self, source: str, place: int, survival: float, num_drafts: int) -> bool:
        self.asked.append((source, place, num_drafts))
        return self.answer

    def value(self, guesses: Sequence[Guess]) -> float:
        return float(len(guesses))

    def prospect(self, source: str, limit: int, num_drafts: int) -> float:
        return self.prospects
