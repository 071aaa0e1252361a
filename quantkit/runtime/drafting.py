"""What the generation loop asks of whoever drafts: two protocols; `quantkit.speculative` has both.

The runtime itself drafts nothing and imports nobody who does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quantkit.runtime.engine import Engine
from quantkit.runtime.params import ResolvedParams
from quantkit.runtime.request import Request
from quantkit.runtime.stats import DraftStats
from quantkit.runtime.verification import Draft, Verifier


class Speculation(Protocol):
    """Drafting for one generation.

    `engine` is what to run the model through: the model, or what watches it for the drafter.
    """

    engine: Engine
    verify: Verifier
    stats: DraftStats

    def propose(self, running: Sequence[Request]) -> list[Draft]:
        """Return a draft for each request, often an empty one."""
        ...

    def observe(
        self,
        running: Sequence[Request],
        drafts: Sequence[Draft],
        counts: Sequence[int],
        draft_seconds: float,
        forward_seconds: float,
    ) -> None:
        """Learn that `counts[i]` tokens were committed to `running[i]`, which has them by now."""
        ...


class Speculator(Protocol):
    """Drafting for one model."""

    def start(self, params: ResolvedParams, num_sequences: int) -> Speculation:
        """Return the speculation of one generation, of sequences numbered from 0."""
        ...

    def forget(self) -> None:
        """Forget the texts of earlier generations; what they taught about drafting stays."""
        ...
