"""Which sequences of a batch are worth drafting for: those that decide when it is done.

A batch is done with its last sequence. A token gained for one that is ahead of others frees its
rows of a step earlier, which is less than drafting for it costs. That holds where texts end at
their limits, so that who is ahead stays known; where they end by themselves, any may be the last.
"""

from __future__ import annotations

from collections.abc import Sequence

SLACK = 3
"""Tokens ahead of the last that are no lead: one lucky draft brings as many, and a drafting pass
costs less the more sequences share it."""
MEMORY = 0.9
"""Weight of the past, per text, in how often texts end at their limits."""


class Pace:
    """Knows how texts have ended so far, in all generations of a model."""

    def __init__(self) -> None:
        self._limited = 1.0  # until one has ended, limits are what is known

    def behind(self, rooms: Sequence[int]) -> list[bool]:
        """Return who decides when the batch is done; `rooms` are the tokens that may follow."""
        if self._limited < 0.5:
            return [True] * len(rooms)
        most = max(rooms)
        return [room >= most - SLACK for room in rooms]

    def observe(self, limited: bool) -> None:
        """Count a text that has ended, at its limit or by itself."""
        self._limited = MEMORY * self._limited + (1 - MEMORY) * limited
