"""How often guesses are accepted: counts by source, feature and place in the draft."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from quantkit.runtime.verification import Draft, Guess

PRIOR_WEIGHT = 4.0
"""Trials that a prior counts for."""
PROMISE_WEIGHT = 1.0
"""Accepted tokens that the priors of a source are trusted for at first."""
HIGHEST_PRIOR = 0.95
"""However well a source does, a kind that is new is not certain."""
MEMORY = 200.0
"""Trials of a kind after which its counts are halved, so that they follow the text."""
PLACES = 8
"""Places in a draft from here on are counted together."""
FIRST_PROSPECT = 0.6
"""P(accepted) of a token that a source has yet to draft, before any was counted."""

_ANY = object()
"""In place of a feature: all of them."""


class Acceptance:
    """Estimates P(a drafted token is accepted | all before it are).

    Only tokens that were judged are counted: those after the first refused one say nothing. A kind
    of guess is counted at each place of a draft, and at all places together: that is what is
    assumed of a place that was hardly ever reached. Where a kind is new, its prior is corrected by
    how the priors of all kinds of the source have done so far.
    """

    def __init__(self) -> None:
        self._counts: dict[Hashable, tuple[float, float]] = {}  # accepted, tried
        self._promised: dict[str, tuple[float, float]] = {}  # accepted, sum of priors

    def rate(self, guess: Guess, place: int) -> float:
        """Return the estimate for a guess at a place of its draft, counted from 0."""
        anywhere = (guess.source, guess.feature)
        hits, promised = self._promised.get(guess.source, (0.0, 0.0))
        honesty = (hits + PROMISE_WEIGHT) / (promised + PROMISE_WEIGHT)
        prior = self._estimate(anywhere, min(honesty * guess.prior, HIGHEST_PRIOR))
        return self._estimate((*anywhere, min(place, PLACES)), prior)

    def prospect(self, source: str, place: int) -> float:
        """Return the estimate for what `source` would draft at a place, whatever that is."""
        prior = self._estimate(source, FIRST_PROSPECT)
        return self._estimate((source, _ANY, min(place, PLACES)), prior)

    def survivals(self, guesses: Sequence[Guess]) -> list[float]:
        """Return for each guess the estimate that it and all before it are accepted."""
        survival, result = 1.0, []
        for place, guess in enumerate(guesses):
            survival *= self.rate(guess, place)
            result.append(survival)
        return result

    def observe(self, draft: Draft, accepted: int, judged: int) -> None:
        """Count a draft of which `judged` tokens were judged and the first `accepted` accepted."""
        for place, guess in enumerate(draft.guesses[:judged]):
            source, feature, near = guess.source, guess.feature, min(place, PLACES)
            for kind in (
                source,
                (source, feature),
                (source, feature, near),
                (source, _ANY, near),
            ):
                self._count(kind, place < accepted)
            hits, promised = self._promised.get(source, (0.0, 0.0))
            keep = 1.0 if promised < MEMORY else 0.5
            self._promised[source] = (
                keep * hits + (place < accepted),
                keep * promised + guess.prior,
            )

    def _count(self, kind: Hashable, accepted: bool) -> None:
        hits, trials = self._counts.get(kind, (0.0, 0.0))
        if trials >= MEMORY:
            hits, trials = hits / 2, trials / 2
        self._counts[kind] = hits + accepted, trials + 1

    def _estimate(self, kind: Hashable, prior: float) -> float:
        hits, trials = self._counts.get(kind, (0.0, 0.0))
        return (hits + PRIOR_WEIGHT * prior) / (trials + PRIOR_WEIGHT)
