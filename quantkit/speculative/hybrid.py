"""The hybrid drafter: for each sequence and step the one of two drafters that promises more.

The first is a drafter whose drafts cost nothing, the second one that runs a model.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.runtime.engine import Engine
from quantkit.runtime.request import Request
from quantkit.runtime.verification import Draft
from quantkit.speculative.drafter import Drafter, DraftSession, Judge
from quantkit.speculative.drawing import Draw


class HybridSession:
    """Drafting for one generation; implements DraftSession."""

    def __init__(self, free: DraftSession, costly: DraftSession, source: str) -> None:
        self._free = free
        self._costly = costly
        self._source = source

    @property
    def engine(self) -> Engine:
        """What the second drafter runs the target through; the first only reads tokens."""
        return self._costly.engine

    @property
    def passes(self) -> int:
        """Passes of the second drafter's model."""
        return self._costly.passes

    def propose(
        self, requests: Sequence[Request], limits: Sequence[int], judge: Judge
    ) -> list[Draft]:
        """Ask the second drafter where it promises more than what the first has found."""
        drafts = self._free.propose(requests, limits, judge)
        values = [judge.value(draft.guesses) for draft in drafts]
        together = sum(limit > 0 for limit in limits)
        asked = [
            index
            for index, (value, limit) in enumerate(zip(values, limits, strict=True))
            if limit > 0 and judge.prospect(self._source, limit, together) >= value
        ]
        if asked:
            some = [requests[index] for index in asked]
            better = self._costly.propose(some, [limits[index] for index in asked], judge)
            for index, draft in zip(asked, better, strict=True):
                if judge.value(draft.guesses) >= values[index]:
                    drafts[index] = draft
        return drafts

    def finish(self, request: Request) -> None:
        """Let both learn."""
        self._free.finish(request)
        self._costly.finish(request)


class HybridDrafter:
    """Two drafters; implements Drafter. `source` is what the second calls its guesses."""

    def __init__(self, free: Drafter, costly: Drafter, source: str) -> None:
        self._free = free
        self._costly = costly
        self._source = source

    def session(self, target: Engine, num_sequences: int, draw: Draw) -> DraftSession:
        """Return a session of both."""
        return HybridSession(
            self._free.session(target, num_sequences, draw),
            self._costly.session(target, num_sequences, draw),
            self._source,
        )

    def forget(self) -> None:
        """Let both forget."""
        self._free.forget()
        self._costly.forget()
