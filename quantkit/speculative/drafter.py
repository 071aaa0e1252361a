"""What a drafter is: two protocols. Drafters know neither each other nor how drafts are judged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quantkit.runtime.engine import Engine
from quantkit.runtime.request import Request
from quantkit.runtime.verification import Draft, Guess
from quantkit.speculative.drawing import Draw


class Judge(Protocol):
    """Whether drafting pays, from acceptance and cost as measured so far."""

    def chance(self, guess: Guess, place: int) -> float:
        """Return P(a guess is accepted) at a place of its draft, if all before it are."""
        ...

    def pays(self, source: str, place: int, survival: float, num_drafts: int) -> bool:
        """Return whether `source` should run another pass to draft the token at `place`.

        `survival` is P(all before it are accepted), the product of their chances; `num_drafts`
        drafts share the pass.
        """
        ...

    def value(self, guesses: Sequence[Guess]) -> float:
        """Return how many tokens of a draft are expected to be accepted, less their cost."""
        ...

    def prospect(self, source: str, limit: int, num_drafts: int) -> float:
        """Return the `value` expected of a draft that `source` has yet to make, less its cost."""
        ...


class DraftSession(Protocol):
    """Drafting for the sequences of one generation."""

    @property
    def engine(self) -> Engine:
        """What to run the target through: the target, or what watches it for the drafter."""
        ...

    @property
    def passes(self) -> int:
        """Model passes run so far, to know what one takes; 0 if there is no model."""
        ...

    def propose(
        self, requests: Sequence[Request], limits: Sequence[int], judge: Judge
    ) -> list[Draft]:
        """Return a draft of at most `limits[i]` tokens for each request, possibly empty.

        What was committed since the last call is read from the requests.
        """
        ...

    def finish(self, request: Request) -> None:
        """Learn from a request that has ended, and forget it."""
        ...


class Drafter(Protocol):
    """A source of drafts; lives as long as the model it drafts for."""

    def session(self, target: Engine, num_sequences: int, draw: Draw) -> DraftSession:
        """Return a session for a generation of `num_sequences`, numbered from 0."""
        ...

    def forget(self) -> None:
        """Forget the texts of earlier generations."""
        ...
